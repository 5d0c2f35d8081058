// Sums, means and extrema over one axis of a block.
#pragma once
#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int64_t kRun = 32;  // additions in a row before a partial sum is put aside: the error of torch's pairwise sum

struct Add {
  static Floats start() { return Floats{}; }
  static Floats join(Floats a, Floats b) { return a + b; }
  static float lanes(Floats v) { return sum(v); }
};

struct Most {
  static Floats start() { return splat(-__builtin_inff()); }
  static Floats join(Floats a, Floats b) { return maximum(a, b); }
  static float lanes(Floats v) { return largest(v); }
};

struct Least {
  static Floats start() { return splat(__builtin_inff()); }
  static Floats join(Floats a, Floats b) { return minimum(a, b); }
  static float lanes(Floats v) { return -largest(-v); }
};

template <class R>
inline float along(const float* from, int64_t n) {
  Floats total = R::start();
  int64_t i = 0;
  while (i + kLanes <= n) {
    Floats part = R::start();
    for (int64_t run = 0; run < kRun && i + kLanes <= n; run++, i += kLanes) part = R::join(part, load(from + i));
    total = R::join(total, part);
  }
  if (i < n) {
    const int rest = int(n - i);
    total = R::join(total, lane_numbers() < rest ? load(from + i, rest) : R::start());
  }
  return R::lanes(total);
}

// A vector of columns of [n, inner].
template <class R, class L>
inline Floats down(const float* from, int64_t n, int64_t inner, L get) {
  Floats total = R::start();
  for (int64_t i = 0; i < n;) {
    Floats part = R::start();
    for (int64_t run = 0; run < kRun && i < n; run++, i++) part = R::join(part, get(from + i * inner));
    total = R::join(total, part);
  }
  return total;
}

template <class R>
void reduce_by(float* to, const float* from, int64_t outer, int64_t n, int64_t inner, float divisor) {
  for (int64_t o = 0; o < outer; o++, from += n * inner, to += inner) {
    if (inner == 1) {
      to[0] = along<R>(from, n) / divisor;
      continue;
    }
    int64_t j = 0;
    for (; j + kLanes <= inner; j += kLanes)
      store(to + j, down<R>(from + j, n, inner, [](const float* at) { return load(at); }) / divisor);
    if (const int rest = int(inner - j); rest > 0)
      store(to + j, down<R>(from + j, n, inner, [rest](const float* at) { return load(at, rest); }) / divisor, rest);
  }
}

static void reduce(int64_t op, float* to, const float* from, int64_t outer, int64_t n, int64_t inner) {
  switch (op) {
    case kSum: return reduce_by<Add>(to, from, outer, n, inner, 1.0f);
    case kMean: return reduce_by<Add>(to, from, outer, n, inner, float(n));
    case kAmin: return reduce_by<Least>(to, from, outer, n, inner, 1.0f);
    default: return reduce_by<Most>(to, from, outer, n, inner, 1.0f);
  }
}

}  // namespace fxopt::FXOPT_ISA
