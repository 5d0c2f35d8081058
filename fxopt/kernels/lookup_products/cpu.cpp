// fxopt::lookup_products on the CPU: pairs of columns over torch's threads.
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <vector>

#include "../columns/checked.h"
#include "../columns/schedule.h"
#include "../entry.h"
#include "../scratch.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(products, lookup_products)

constexpr int64_t kRows = 2048;   // of a work item: the tables of a pair stay in the cache meanwhile (1024, 4096: the same)
constexpr int64_t kBlock = 8192;  // rows whose ids are made together; for each pair anew they were 2/3 of the time

// work(item) of all items over torch's threads; whether all of them went well.
template <class Work>
static bool each(int64_t items, int64_t threads, const Work& work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> fine{true};
  const auto run = [&](int64_t, int64_t) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;)
      if (!work(item)) fine = false;
  };
  threads = std::min(threads, items);
  if (threads <= 1) run(0, 1);
  else torch::stable::parallel_for(0, threads, 1, run);
  return fine;
}

static bool run_block(const Products& all, int64_t n_groups) {
  // D = 8: 1.0 to 1.4 ns a pair, at batch 1 15 to 35.
  const double nanoseconds = double(all.pairs) * (30 + double(all.stride) * (0.8 + 0.05 * double(all.dim)));
  const int64_t threads = std::min<int64_t>(int64_t(nanoseconds / kParallelNs) + 1, torch::stable::get_num_threads());
  if (!each(n_groups, threads, [&](int64_t group) { return chosen->find(all, group); })) return false;
  const int64_t tiles = (all.pairs + kPairs - 1) / kPairs, parts = (all.stride + kRows - 1) / kRows;
  return each(tiles * parts, threads, [&](int64_t item) {
    const int64_t pair = item % tiles * kPairs, row = item / tiles * kRows;
    return chosen->multiply(all, pair, std::min(pair + kPairs, all.pairs), row, std::min(row + kRows, all.stride));
  });
}

// Operands: the columns' tensors and tables. Words: a Setting with its groups, and the columns' plan.
static void run(const Request& request) {
  const Setting& setting = *reinterpret_cast<const Setting*>(request.words);
  const int64_t* firsts = request.words + sizeof(Setting) / sizeof(int64_t);
  const int64_t* groups = firsts + setting.n_groups;
  check_counts(groups + setting.n_columns, request.words + request.n_words - (groups + setting.n_columns));
  const Plan plan(groups + setting.n_columns);
  if (plan.header->n_outputs != 1 || plan.header->n_columns != setting.n_columns || request.n_arguments != 2)
    refused("fxopt.lookup_products: expected a plan of one output");
  Products all{{plan, request.operands, request.argument(1), request.counts[0], request.counts[1], nullptr, nullptr}, firsts, groups};
  all.pairs = setting.n_columns / 2, all.dots = setting.dots, all.row0 = 0;
  OutputData output = measure(all.call, plan.outputs[0]);
  all.rows = output.rows, all.dim = dim_of(all.call, plan.columns[0]);
  all.call.outputs = &output;
  all.out = request.floats({all.rows, all.dots ? all.pairs : all.pairs * all.dim});
  output.data = reinterpret_cast<char*>(all.out);  // where no row is written
  const int64_t block = std::min(all.rows, kBlock);
  all.largest = reinterpret_cast<uint64_t*>(scratch(size_t(setting.n_groups) * (sizeof(uint64_t) + size_t(block) * sizeof(int32_t))));
  all.ids = reinterpret_cast<int32_t*>(all.largest + setting.n_groups);
  for (; all.row0 < all.rows; all.row0 += block) {
    all.stride = std::min(block, all.rows - all.row0);
    if (!run_block(all, setting.n_groups)) refused("fxopt.lookup_products: not plain lookups, or an id outside its table");
  }
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_lookup_products_run(const fxopt::Request* request) { fxopt::run(*request); }
