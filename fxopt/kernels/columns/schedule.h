// The work items of a call over torch's intra-op threads.
#pragma once
#include <mutex>
#include <vector>

#include "../threads.h"
#include "call.h"
#include "sizes.h"

namespace fxopt {

// Tuned at 1000 columns of dim 8 (2 threads, AVX-512): 64 to 512 rows are within 5%, 16 and 2048 cost 20%.
constexpr int64_t kLightItem = 2048;  // lookups in a work item of single-id columns
constexpr int64_t kHeavyItem = 1 << 20;  // floats read in a work item of a pooled column: each starts with cold rows
constexpr double kTouchNs = 60;  // to resolve a column and miss the cache: 1000 at batch 1 take 92 us, on two threads 58
constexpr double kParallelNs = 30000; // less estimated work than this runs on the calling thread

struct Work {
  std::vector<int64_t> first_item, rows;  // per tile, and one past the end
  double nanoseconds = 0;
};

// Average floats read per row of a pooled or many-lane column.
inline double row_cost(const Call& call, const Column& column, int64_t rows) {
  double ids = 1;
  if (column.has(kHasBag) && column.pool != kNone)
    ids = double(size_of(tensor_at(call, column.source.tensor), 0)) / double(rows) / double(call.plan.extras[column.extra].segments);
  else ids = double(lanes_of(call, column.source));
  return ids * double(dim_of(call, column) + 16);
}

inline void plan_work(const Call& call, Work& work) {
  const int64_t n = call.plan.header->n_tiles, threads = int64_t(torch::stable::get_num_threads());
  work.first_item.assign(n + 1, 0);
  work.rows.assign(n, 0);
  work.nanoseconds = 0;
  for (int64_t t = 0; t < n; t++) {
    const Tile& tile = call.plan.tiles[t];
    const int64_t rows = call.outputs[tile.output].rows;
    if (rows == 0) {
      work.rows[t] = 1;
      work.first_item[t + 1] = work.first_item[t] + 1;  // its columns are still checked
      continue;
    }
    int64_t item;
    if (tile.heavy) {
      const double cost = row_cost(call, call.plan.columns[tile.first], rows) * tile.count;
      item = std::min(int64_t(kHeavyItem / (cost + 1)), threads > 1 ? rows / (2 * threads) : rows);
      work.nanoseconds += 0.2 * cost * rows;
    } else {
      item = kLightItem / tile.count;
      work.nanoseconds += (kTouchNs + 10.0 * rows) * tile.count;
    }
    work.rows[t] = item < 8 ? 8 : item;
    work.first_item[t + 1] = work.first_item[t] + (rows + work.rows[t] - 1) / work.rows[t];
  }
}

// The items of one thread. It takes them from the front; threads that are done with theirs do so, too.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

inline void run_item(const Call& call, const Kernels& kernels, const Work& work, int64_t item, Error& error) {
  const auto tile = std::upper_bound(work.first_item.begin(), work.first_item.end(), item) - work.first_item.begin() - 1;
  const int64_t rows = call.outputs[call.plan.tiles[tile].output].rows;
  const int64_t row0 = (item - work.first_item[tile]) * work.rows[tile];
  const int64_t row1 = row0 + work.rows[tile] < rows ? row0 + work.rows[tile] : rows;
  Error here;
  if (!kernels.run_tile(call, call.plan.tiles[tile], row0, row1, here) && here.before(error)) error = here;
}

// Every item runs even after one fails: which error is reported must not depend on the threads.
inline void run_all(const Call& call, const Kernels& kernels, Error& error) {
  thread_local Work work;  // keeps its memory between calls
  plan_work(call, work);
  const int64_t n_items = work.first_item.back();
  const int64_t threads = threads_for(work.nanoseconds, kParallelNs, n_items);
  if (threads <= 1) {
    for (int64_t item = 0; item < n_items; item++) run_item(call, kernels, work, item, error);
    return;
  }
  // Each thread begins with the same items at each call, whose tables and outputs are then in its core's cache.
  std::vector<Share> shares(static_cast<size_t>(threads));
  for (int64_t t = 0; t < threads; t++) {
    shares[size_t(t)].next = t * n_items / threads;
    shares[size_t(t)].end = (t + 1) * n_items / threads;
  }
  std::mutex mutex;
  const Work& shared = work;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t own, int64_t) {
    Error here;
    for (int64_t t = 0; t < threads; t++) {
      Share& share = shares[size_t((own + t) % threads)];
      for (int64_t item; (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) run_item(call, kernels, shared, item, here);
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (here.before(error)) error = here;
  });
}

}  // namespace fxopt
