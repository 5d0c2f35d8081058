// A softmax in place, of numbers that fill whole vectors.
#pragma once
#include "math.h"

namespace fxopt::FXOPT_ISA {

// exp of what is at most 0, as a softmax needs it: 0 below 2^-126, where masked keys and padding are. To make denormals
// of those costs more than the softmax: a head of 26 keys, dim 8, takes 1.38 us with them and 0.82 us without.
inline Floats exp_below(Floats x) {
  const Floats lowest = splat(-87.3f);
  return x < lowest ? Floats{} : exp(maximum(x, lowest));
}

inline float most_of(Floats v) {
#if FXOPT_VECTOR_BYTES == 64
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int lane = 1; lane < kLanes; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
#endif
}

// Fills the last vector of n numbers with what a softmax makes 0.
inline void pad_for_softmax(float* x, int64_t n) {
  const int64_t last = n / kLanes * kLanes;
  if (last < n) store(x + last, lane_numbers() < int(n - last) ? load(x + last) : splat(-__builtin_inff()));
}

// Of n > 0 numbers, padded. A NaN makes all of them NaN, as minus infinities alone do, which are 0 if this is `safe`.
static void softmax(float* x, int64_t n, bool safe = false) {
  Floats most = load(x), total{};
  for (int64_t k = kLanes; k < n; k += kLanes) {
    const Floats next = load(x + k);
    most = next > most ? next : most;
  }
  const Floats top = splat(most_of(most));
  if (safe && top[0] == -__builtin_inff()) {
    memset(x, 0, size_t(n) * sizeof(float));
    return;
  }
  for (int64_t k = 0; k < n; k += kLanes) {
    const Floats e = exp_below(load(x + k) - top);
    total += e;
    store(x + k, e);
  }
  const Floats scale = splat(1.0f / sum(total));
  for (int64_t k = 0; k < n; k += kLanes) store(x + k, load(x + k) * scale);
}

}  // namespace fxopt::FXOPT_ISA
