// Products of a few rows of numbers with a few vectors of columns, added up in registers.
#pragma once
#include "vector.h"

namespace fxopt::FXOPT_ISA {

// sum[r][v] += left[r, k] * right[k, v] for all k < K, with one load of a vector for all rows. left: `row` apart from row to
// row, `step` from k to k + 1; right: vectors side by side, `width` apart from k to k + 1. last: how much of the last vector
// there is. Inlined, with all loops over sums unrolled, or these would live in memory.
template <int ROWS, int VECTORS>
[[gnu::always_inline]] inline void add_products(
    const float* left, int64_t row, int64_t step, const float* right, int64_t width, int64_t K, Floats (&sum)[ROWS][VECTORS], int last = kLanes) {
  for (int64_t k = 0; k < K; k++, right += width) {
    Floats b[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) b[v] = load_part(right + v * kLanes, v + 1 < VECTORS ? kLanes : last);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Floats a = splat(left[r * row + k * step]);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sum[r][v] = fma(a, b[v], sum[r][v]);
    }
  }
}

}  // namespace fxopt::FXOPT_ISA
