// Squares of floats turned over in registers, and the vectors of a batch row side by side.
#pragma once
#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

#ifdef __clang__
#define FXOPT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FXOPT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})  // GCC knows the other one from 12 on
#endif

// The lower and the upper halves of two vectors, lane by lane in turn.
#if FXOPT_VECTOR_BYTES == 64
inline Floats zip_low(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline Floats zip_high(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
#elif FXOPT_VECTOR_BYTES == 32
inline Floats zip_low(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Floats zip_high(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline Floats zip_low(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 0, 4, 1, 5); }
inline Floats zip_high(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 2, 6, 3, 7); }
#endif

// v[k][l] becomes v[l][k]. Zipping the halves moves the first bit of (row, lane) behind the last one, so as many zips
// as a row number has bits exchange rows and lanes.
[[gnu::always_inline]] inline void transpose(Floats (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Floats zipped[kLanes];
#pragma GCC unroll 8
    for (int k = 0; k < kLanes / 2; k++) {
      zipped[2 * k] = zip_low(v[k], v[k + kLanes / 2]);
      zipped[2 * k + 1] = zip_high(v[k], v[k + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; k++) v[k] = zipped[k];
  }
}

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats [d, d + kLanes) of vector f of row b; 0 behind the last one, and behind the last vector.
inline Floats lanes_of(const Fields& x, int64_t b, int64_t f, int64_t d) {
  if (f >= x.F) return Floats{};
  const int64_t lane = x.lane[f], n = x.D - d;
  const float* from = x.data[f] + b * x.row[f] + d * lane;
  if (lane == 1) return load_part(from, n);
  Floats v{};
  for (int k = 0; k < kLanes && k < n; k++) v[k] = from[k * lane];
  return v;
}

// columns[d, f] = x[b, f, d], [D rounded up to kLanes, width]; width is a multiple of kLanes, 0 behind the last vector.
inline void load_columns(const Fields& x, int64_t b, int64_t width, float* columns) {
  for (int64_t f = 0; f < width; f += kLanes) {
    for (int64_t d = 0; d < x.D; d += kLanes) {
      Floats v[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++) v[k] = lanes_of(x, b, f + k, d);
      transpose(v);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++) store(columns + (d + k) * width + f, v[k]);
    }
  }
}

// rows[f, d] = x[b, f, d], [F, depth]; depth is D rounded up to kLanes, 0 behind the last float.
inline void load_rows(const Fields& x, int64_t b, int64_t depth, float* rows) {
  for (int64_t f = 0; f < x.F; f++)
    for (int64_t d = 0; d < depth; d += kLanes) store(rows + f * depth + d, lanes_of(x, b, f, d));
}

}  // namespace fxopt::FXOPT_ISA
