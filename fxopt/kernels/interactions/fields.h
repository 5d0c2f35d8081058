// The vectors of a batch row, side by side in memory.
#pragma once
#include "../simd/products.h"
#include "../simd/transpose.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

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
