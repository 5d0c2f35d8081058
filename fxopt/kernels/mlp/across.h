// y = x W + b for W as it was written down, [K, N] row by row (matmul, einsum): rows of x times rows of W,
// broadcast. Its stride is from k to k + 1.
#pragma once
#include "../gemm/gemm.h"

namespace fxopt::FXOPT_ISA {

// Sums of so many products are added up in pairs of such blocks: one chain of 1024 has 2-4x the error of torch's.
constexpr int64_t kSummed = 64;

// MR rows by NV vectors of columns, the last of them `rest` wide.
template <int MR, int NV>
[[gnu::always_inline]] inline void across_tile(const Gemm& g, int64_t m, int64_t n, int rest) {
  const auto part = [&](const float* from, int j) { return load_part(from + j * kLanes, j + 1 < NV ? kLanes : rest); };
  for (int64_t k = 0; k < g.K || k == 0; k += kSummed) {
    const int64_t end = k + kSummed < g.K ? k + kSummed : g.K;
    Floats sum[MR][NV] = {};
    add_products(g.x + m * g.x_stride + k, g.x_stride, 1, g.w + k * g.w_stride + n, g.w_stride, end - k, sum, rest);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      float* y = g.y + (m + r) * g.y_stride + n;
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) {
        const Floats before = k ? part(y, j) : (g.bias ? part(g.bias + n, j) : Floats{});
        store_part(y + j * kLanes, before + sum[r][j], j + 1 < NV ? kLanes : rest);
      }
    }
  }
}

template <int NV>
inline void across_columns(const Gemm& g, int64_t n, int rest) {
  constexpr int MR = FXOPT_VECTOR_BYTES == 64 ? 6 : 2;
  int64_t m = 0;
  for (; m + MR <= g.M; m += MR) across_tile<MR, NV>(g, m, n, rest);
  for (; m + 2 <= g.M; m += 2) across_tile<2, NV>(g, m, n, rest);
  if (m < g.M) across_tile<1, NV>(g, m, n, rest);
}

// Columns [n0, n1) of all rows.
inline void across(const Gemm& g, int64_t n0, int64_t n1) {
  int64_t n = n0;
  for (; n + 4 * kLanes <= n1; n += 4 * kLanes) across_columns<4>(g, n, kLanes);
  for (; n < n1; n += kLanes) across_columns<1>(g, n, n1 - n < kLanes ? int(n1 - n) : kLanes);
}

}  // namespace fxopt::FXOPT_ISA
