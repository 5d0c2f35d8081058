// The blocks of a call over torch's intra-op threads.
#pragma once
#include "../threads.h"
#include "block.h"

namespace fxopt {

constexpr double kParallelNs = 30000;  // less estimated work than this runs on the calling thread

inline void run_all(const Job& job) {
  const int64_t n_blocks = (job.rows + job.block - 1) / job.block;
  const int64_t threads = threads_for(job.nanoseconds, kParallelNs, n_blocks);
  std::atomic<int64_t> next{0};
  constexpr int64_t kTogether = 4;  // neighbouring blocks, so that threads do not share pages
  const auto work = [&] {
    Worker worker(job);
    for (int64_t first; (first = next.fetch_add(kTogether, std::memory_order_relaxed)) < n_blocks;)
      for (int64_t b = first; b < first + kTogether && b < n_blocks; b++) worker.run(b * job.block);
  };
  if (threads <= 1) return work();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(); });
}

}  // namespace fxopt
