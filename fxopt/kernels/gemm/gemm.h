// y = x W^T + b for weights as nn.Linear keeps them, [N, K] row by row, which nobody has packed before.
//
// Dot products along K, both sides as they lie in memory: six rows of x by four of W in registers, so that weights
// are read once for six rows. Short dot products of many rows: panels of W are turned into [K, 2 vectors] first, and a tile of
// rows multiplies them by broadcasts (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication").
// Single core, AVX-512 AMD, GFlop/s: [1, 512] x [512, 256] 77 (MKL 36, oneDNN 17), [13, ..] 208 (77, 99), [256, ..]
// 238 (111, 239), [4096, ..] 224 (106, 241); [256, 64] x [64, 64] 213 (98, 108); [4096, 16] x [16, 16] 137 (79, 93).
#pragma once
#include "vectors.h"

namespace fxopt::FXOPT_ISA {

// Strides in elements; the last dim of each is dense.
template <class T>
struct Gemm {
  const T* x;
  int64_t x_stride;  // from row to row
  int64_t M, K;
  const T* w;
  int64_t w_stride;
  const T* bias;  // null: none
  T* y;
  int64_t y_stride;
};

// Summing vectors costs more than turning W does: [64, 64] x [64, 64] 145 GFlop/s against 131, [4096, 128] x [128, 128]
// 1.15x, from K = 512 on nothing. Broadcasts add a whole row of K in one order, with 2-4x torch's error at K = 1024.
constexpr int64_t kTurnedRows = 48, kTurnedK = 128;

template <class T, int MR, int NR>
[[gnu::always_inline]] inline void dot_tile(const Gemm<T>& g, int64_t m, int64_t n) {
  using A = Acc<T>;
  constexpr int L = kLanesOf<A>;
  const T *x = g.x + m * g.x_stride, *w = g.w + n * g.w_stride;
  Vec<A> sum[MR][NR] = {};
  int64_t k = 0;
  for (; k + L <= g.K; k += L) {
    Vec<A> b[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) b[j] = load(w + j * g.w_stride + k);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const Vec<A> a = load(x + i * g.x_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < NR; j++) sum[i][j] = fused<A>(a, b[j], sum[i][j]);
    }
  }
  if (const int rest = int(g.K - k)) {
    Vec<A> b[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) b[j] = load_some(w + j * g.w_stride + k, rest);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const Vec<A> a = load_some(x + i * g.x_stride + k, rest);
#pragma GCC unroll 8
      for (int j = 0; j < NR; j++) sum[i][j] = fused<A>(a, b[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    A total[NR];
    sums_of<A, NR>(sum[i], total);
    T* y = g.y + (m + i) * g.y_stride + n;
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) y[j] = narrowed<T>(total[j] + (g.bias ? widened(g.bias[n + j]) : A(0)));
  }
}

// Columns [n0, n1) of MR rows.
template <class T, int MR>
inline void dot_rows(const Gemm<T>& g, int64_t m, int64_t n0, int64_t n1) {
  constexpr int NR = MR == 1 ? 8 : MR <= 3 ? 4 : FXOPT_VECTOR_BYTES == 64 ? 4 : 2;  // 16 registers hold less than 32
  int64_t n = n0;
  for (; n + NR <= n1; n += NR) dot_tile<T, MR, NR>(g, m, n);
  for (; n < n1; n++) dot_tile<T, MR, 1>(g, m, n);
}

// Rows [0, M) x columns [n0, n1) by dot products.
template <class T>
void gemm_by_dots(const Gemm<T>& g, int64_t n0, int64_t n1) {
  constexpr int MR = FXOPT_VECTOR_BYTES == 64 ? 6 : 4;
  const int64_t block = 1 + (1 << 19) / (g.K * int64_t(sizeof(T)) + 1);  // rows of W that stay in the second cache
  for (int64_t n = n0; n < n1; n += block) {
    const int64_t end = n + block < n1 ? n + block : n1;
    int64_t m = 0;
    for (; m + MR <= g.M; m += MR) dot_rows<T, MR>(g, m, n, end);
    if constexpr (__is_same(T, float)) {  // W is read once: [4, ..] x five layers of DLRM's 102 us, in two tiles 187
      if (g.M - m == 5) dot_rows<T, 5>(g, m, n, end), m += 5;
      if (g.M - m == 4) dot_rows<T, 4>(g, m, n, end), m += 4;
    }
    for (; m + 3 <= g.M; m += 3) dot_rows<T, 3>(g, m, n, end);
    if (g.M - m == 2) dot_rows<T, 2>(g, m, n, end);
    if (g.M - m == 1) dot_rows<T, 1>(g, m, n, end);
  }
}

template <class T, int MR, int NV>
[[gnu::always_inline]] inline void panel_tile(const Gemm<T>& g, const Acc<T>* panel, int64_t m, int64_t n, int columns) {
  using A = Acc<T>;
  constexpr int L = kLanesOf<A>;
  const T* x = g.x + m * g.x_stride;
  Vec<A> sum[MR][NV] = {};
  for (int64_t k = 0; k < g.K; k++, panel += NV * L) {
    Vec<A> b[NV];
#pragma GCC unroll 2
    for (int j = 0; j < NV; j++) b[j] = load(panel + j * L);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      const Vec<A> a = Vec<A>{} + widened(x[i * g.x_stride + k]);
#pragma GCC unroll 2
      for (int j = 0; j < NV; j++) sum[i][j] = fused<A>(a, b[j], sum[i][j]);
    }
  }
  A bias[NV * L] = {};
  if (g.bias)
    for (int j = 0; j < columns; j++) bias[j] = widened(g.bias[n + j]);
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
    T* y = g.y + (m + i) * g.y_stride + n;
    A row[NV * L];
#pragma GCC unroll 2
    for (int j = 0; j < NV; j++) {
      const Vec<A> total = sum[i][j] + load(bias + j * L);
      memcpy(row + j * L, &total, sizeof total);
    }
    if (columns == NV * L)
      for (int j = 0; j < NV * L; j++) y[j] = narrowed<T>(row[j]);
    else
      for (int j = 0; j < columns; j++) y[j] = narrowed<T>(row[j]);
  }
}

// Columns [n, n + columns) of W as [K, NV vectors], zeros behind them.
template <class T, int NV>
inline void turn(const Gemm<T>& g, int64_t n, int columns, Acc<T>* panel) {
  constexpr int P = NV * kLanesOf<Acc<T>>;
  const T* w = g.w + n * g.w_stride;
  for (int64_t k = 0; k < g.K; k++) {
    for (int j = 0; j < columns; j++) panel[k * P + j] = widened(w[j * g.w_stride + k]);
    for (int j = columns; j < P; j++) panel[k * P + j] = 0;
  }
}

template <class T, int NV>
inline void panel_columns(const Gemm<T>& g, int64_t n, int columns) {
  constexpr int MR = FXOPT_VECTOR_BYTES == 64 ? 12 : 6;
  alignas(64) Acc<T> panel[kTurnedK * NV * kLanesOf<Acc<T>>];
  turn<T, NV>(g, n, columns, panel);
  int64_t m = 0;
  for (; m + MR <= g.M; m += MR) panel_tile<T, MR, NV>(g, panel, m, n, columns);
  for (; m + 4 <= g.M; m += 4) panel_tile<T, 4, NV>(g, panel, m, n, columns);
  for (; m < g.M; m++) panel_tile<T, 1, NV>(g, panel, m, n, columns);
}

// The same by panels; K <= kTurnedK.
template <class T>
void gemm_by_panels(const Gemm<T>& g, int64_t n0, int64_t n1) {
  constexpr int L = kLanesOf<Acc<T>>;
  int64_t n = n0;
  for (; n + L < n1; n += 2 * L) panel_columns<T, 2>(g, n, n1 - n < 2 * L ? int(n1 - n) : 2 * L);
  if (n1 - n > L / 4) panel_columns<T, 1>(g, n, int(n1 - n));
  else if (n < n1) gemm_by_dots(g, n, n1);
}

// Columns [n0, n1) of all rows of y, by whichever is faster.
template <class T>
inline void gemm(const Gemm<T>& g, int64_t n0, int64_t n1) {
  if (g.M >= kTurnedRows && g.K <= kTurnedK) gemm_by_panels(g, n0, n1);
  else gemm_by_dots(g, n0, n1);
}

}  // namespace fxopt::FXOPT_ISA
