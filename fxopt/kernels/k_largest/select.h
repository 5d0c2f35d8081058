// A list a lane, k numbers of each kept in order: the next one takes its place by a maximum and a minimum a step.
#include <algorithm>
#include <utility>
#include <vector>

#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int64_t kMost = 64;  // of k

// Integers in the order of the floats, NaN above all, as topk has it.
inline Ints key_of(Floats x) {
  const Ints i = bits(x);
  return x == x ? i ^ ((i >> 31) & 0x7fffffff) : i & 0x7fffffff;
}

inline Floats value_of(Ints key) { return from_bits(key ^ ((key >> 31) & 0x7fffffff)); }

inline Floats lanes_of(const float* from, int64_t step, int count) {
  if (step == 1) return load_part(from, count);
  float lanes[kLanes] = {};
  for (int l = 0; l < count; l++) lanes[l] = from[l * step];
  return load(lanes);
}

inline void to_lanes(float* to, int64_t step, int count, Floats value) {
  if (step == 1) return store_part(to, value, count);
  float lanes[kLanes];
  store(lanes, value);
  for (int l = 0; l < count; l++) to[l * step] = lanes[l];
}

// Where more numbers equal the least of the k than have room: which of them torch's topk takes, by its algorithm
// (aten/src/ATen/native/TopKImpl.h), for the order of the others depends on it.
static void as_torch_places(const Largest& job, const float* from, float* to) {
  using Numbered = std::pair<float, int64_t>;
  static thread_local std::vector<Numbered> queue;
  queue.resize(size_t(job.n));
  for (int64_t i = 0; i < job.n; i++) queue[size_t(i)] = {from[i * job.step], i};
  const auto is_larger = [](const Numbered& x, const Numbered& y) { return (x.first != x.first && y.first == y.first) || x.first > y.first; };
  const auto begin = queue.begin(), end = begin + job.k;
  if (job.k * 64 <= job.n) std::partial_sort(begin, end, queue.end(), is_larger);
  else std::nth_element(begin, end - 1, queue.end(), is_larger);
  std::sort(begin, end, [](const Numbered& x, const Numbered& y) { return x.second < y.second; });
  for (int64_t j = 0; j < job.k; j++) to[j * job.to_step] = queue[size_t(j)].first;
}

// The numbers of a list that are not below the least of its k largest, as long as they are so many.
static void place(const Largest& job, const float* from, float least, float* to) {
  float own[kMost + 1];
  int64_t filled = 0;
  for (int64_t i = 0; i < job.n; i++) {
    const float x = from[i * job.step];
    own[filled < job.k ? filled : job.k] = x;
    filled += x != x || x >= least;
  }
  if (filled > job.k) return as_torch_places(job, from, to);
  for (int64_t j = 0; j < job.k; j++) to[j * job.to_step] = own[j];
}

static void largest(const Largest& job) {
  for (int64_t at = 0; at < job.lists; at += kLanes) {
    const int count = int(job.lists - at < kLanes ? job.lists - at : kLanes);
    Ints kept[kMost];
    for (int64_t i = 0; i < job.n; i++) {
      Ints next = key_of(lanes_of(job.from + at * job.list_step + i * job.step, job.list_step, count));
      const int64_t filled = i < job.k ? i : job.k;
      for (int64_t j = 0; j < filled; j++) {
        const Ints larger = next > kept[j] ? next : kept[j];
        next = next > kept[j] ? kept[j] : next;
        kept[j] = larger;
      }
      if (i < job.k) kept[i] = next;
    }
    if (job.placed) {
      float least[kLanes];
      store(least, value_of(kept[job.k - 1]));
      for (int64_t l = 0; l < count; l++) place(job, job.from + (at + l) * job.list_step, least[l], job.to + (at + l) * job.to_list_step);
      continue;
    }
    for (int64_t j = 0; j < job.k; j++)
      to_lanes(job.to + at * job.to_list_step + j * job.to_step, job.to_list_step, count, value_of(kept[j]));
  }
}

const Kernels kernels = {largest};

}  // namespace fxopt::FXOPT_ISA
