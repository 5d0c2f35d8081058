// A list a lane, k numbers of each kept in order: the next one takes its place by a maximum and a minimum a step.
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
    for (int64_t j = 0; j < job.k; j++)
      to_lanes(job.to + at * job.to_list_step + j * job.to_step, job.to_list_step, count, value_of(kept[j]));
  }
}

const Kernels kernels = {largest};

}  // namespace fxopt::FXOPT_ISA
