// Work over torch's intra-op threads.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

namespace fxopt {

// work(first, last) for parts of [0, n); all of it at once where no more than `grain` are to be done, or by one thread.
template <class Work>
void in_parts(int64_t n, int64_t grain, const Work& work) {
  if (n <= grain || torch::stable::get_num_threads() == 1) work(0, n);
  else torch::stable::parallel_for(0, n, grain, work);
}

// How many threads are worth it for so much work: one more for each `share` of it, at most `most`.
inline int64_t threads_for(double work, double share, int64_t most) {
  const int64_t threads = std::min(int64_t(work / share) + 1, most);
  return threads <= 1 ? threads : std::min<int64_t>(threads, torch::stable::get_num_threads());
}

// work(first, last) for `some` of [0, n) after the other, each for the thread that comes next.
template <class Work>
void as_they_come(int64_t n, int64_t threads, int64_t some, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&](int64_t, int64_t) {
    for (int64_t first; (first = next.fetch_add(some, std::memory_order_relaxed)) < n;) work(first, std::min(first + some, n));
  };
  if (threads <= 1) run(0, 1);
  else torch::stable::parallel_for(0, threads, 1, run);
}

}  // namespace fxopt
