// y = x W^T + b for weights as nn.Linear keeps them, [N, K] row by row, which nobody has packed before.
//
// Dot products along K, both sides as they lie in memory: six rows of x by four of W in registers, so that weights
// are read once for six rows. Short dot products of many rows: panels of W are turned into [K, 2 vectors] first, and a tile of
// rows multiplies them by broadcasts (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication").
// Single core, AVX-512 AMD, GFlop/s: [1, 512] x [512, 256] 77 (MKL 36, oneDNN 17), [13, ..] 208 (77, 99), [256, ..]
// 238 (111, 239), [4096, ..] 224 (106, 241); [256, 64] x [64, 64] 213 (98, 108); [4096, 16] x [16, 16] 137 (79, 93).
#pragma once
#include "../simd/products.h"

namespace fxopt::FXOPT_ISA {

// Strides in elements; the last dim of each is dense.
struct Gemm {
  const float* x;
  int64_t x_stride;  // from row to row
  int64_t M, K;
  const float* w;
  int64_t w_stride;
  const float* bias;  // null: none
  float* y;
  int64_t y_stride;
};

// out[i] = the sum of v[i].
template <int N>
[[gnu::always_inline]] inline void sums_of(const Floats (&v)[N], float* out) {
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const __m512 a = (__m512)v[i], b = (__m512)v[i + 1], c = (__m512)v[i + 2], d = (__m512)v[i + 3];
      const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
      const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
      const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
      const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
      _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
    }
    return;
  }
#elif FXOPT_VECTOR_BYTES == 32
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[i], (__m256)v[i + 1]), _mm256_hadd_ps((__m256)v[i + 2], (__m256)v[i + 3]));
      _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
    return;
  }
#endif
  for (int i = 0; i < N; i++) out[i] = sum(v[i]);
}

// Summing vectors costs more than turning W does: [64, 64] x [64, 64] 145 GFlop/s against 131, [4096, 128] x [128, 128]
// 1.15x, from K = 512 on nothing. Broadcasts add a whole row of K in one order, with 2-4x torch's error at K = 1024.
constexpr int64_t kTurnedRows = 48, kTurnedK = 128;

// sum[i][j] += x[i] * w[j], lane by lane, of all lanes or the first few.
template <bool ALL, int MR, int NR>
[[gnu::always_inline]] inline void add_lanes(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int few, Floats (&sum)[MR][NR]) {
  Floats b[NR];
#pragma GCC unroll 8
  for (int j = 0; j < NR; j++) b[j] = ALL ? load(w + j * w_stride) : load(w + j * w_stride, few);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    const Floats a = ALL ? load(x + i * x_stride) : load(x + i * x_stride, few);
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) sum[i][j] = fma(a, b[j], sum[i][j]);
  }
}

template <int MR, int NR>
[[gnu::always_inline]] inline void dot_tile(const Gemm& g, int64_t m, int64_t n) {
  const float *x = g.x + m * g.x_stride, *w = g.w + n * g.w_stride;
  Floats sum[MR][NR] = {};
  int64_t k = 0;
  for (; k + kLanes <= g.K; k += kLanes) add_lanes<true>(x + k, g.x_stride, w + k, g.w_stride, kLanes, sum);
  if (k < g.K) add_lanes<false>(x + k, g.x_stride, w + k, g.w_stride, int(g.K - k), sum);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) {
    float total[NR];
    sums_of<NR>(sum[i], total);
    float* y = g.y + (m + i) * g.y_stride + n;
#pragma GCC unroll 8
    for (int j = 0; j < NR; j++) y[j] = total[j] + (g.bias ? g.bias[n + j] : 0.0f);
  }
}

// Columns [n0, n1) of MR rows.
template <int MR>
inline void dot_rows(const Gemm& g, int64_t m, int64_t n0, int64_t n1) {
  constexpr int NR = MR == 1 ? 8 : MR <= 3 ? 4 : FXOPT_VECTOR_BYTES == 64 ? 4 : 2;  // 16 registers hold less than 32
  int64_t n = n0;
  for (; n + NR <= n1; n += NR) dot_tile<MR, NR>(g, m, n);
  for (; n < n1; n++) dot_tile<MR, 1>(g, m, n);
}

// Rows [0, M) x columns [n0, n1) by dot products.
inline void gemm_by_dots(const Gemm& g, int64_t n0, int64_t n1) {
  constexpr int MR = FXOPT_VECTOR_BYTES == 64 ? 6 : 4;
  const int64_t block = 1 + (1 << 19) / (g.K * int64_t(sizeof(float)) + 1);  // rows of W that stay in the second cache
  for (int64_t n = n0; n < n1; n += block) {
    const int64_t end = n + block < n1 ? n + block : n1;
    int64_t m = 0;
    for (; m + MR <= g.M; m += MR) dot_rows<MR>(g, m, n, end);
    // W is read once: [4, ..] x five layers of DLRM's 102 us, in two tiles 187.
    if (g.M - m == 5) dot_rows<5>(g, m, n, end), m += 5;
    if (g.M - m == 4) dot_rows<4>(g, m, n, end), m += 4;
    for (; m + 3 <= g.M; m += 3) dot_rows<3>(g, m, n, end);
    if (g.M - m == 2) dot_rows<2>(g, m, n, end);
    if (g.M - m == 1) dot_rows<1>(g, m, n, end);
  }
}

template <int MR, int NV>
[[gnu::always_inline]] inline void panel_tile(const Gemm& g, const float* panel, int64_t m, int64_t n, int columns) {
  Floats sum[MR][NV] = {};
  add_products(g.x + m * g.x_stride, g.x_stride, 1, panel, NV * kLanes, g.K, sum);
  float bias[NV * kLanes] = {};
  if (g.bias)
    for (int j = 0; j < columns; j++) bias[j] = g.bias[n + j];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
    float* y = g.y + (m + i) * g.y_stride + n;
    float row[NV * kLanes];
#pragma GCC unroll 2
    for (int j = 0; j < NV; j++) {
      const Floats total = sum[i][j] + load(bias + j * kLanes);
      memcpy(row + j * kLanes, &total, sizeof total);
    }
    if (columns == NV * kLanes)
      for (int j = 0; j < NV * kLanes; j++) y[j] = row[j];
    else
      for (int j = 0; j < columns; j++) y[j] = row[j];
  }
}

// Columns [n, n + columns) of W as [K, NV vectors], zeros behind them.
template <int NV>
inline void turn(const Gemm& g, int64_t n, int columns, float* panel) {
  constexpr int P = NV * kLanes;
  const float* w = g.w + n * g.w_stride;
  for (int64_t k = 0; k < g.K; k++) {
    for (int j = 0; j < columns; j++) panel[k * P + j] = w[j * g.w_stride + k];
    for (int j = columns; j < P; j++) panel[k * P + j] = 0;
  }
}

// Columns [n, n + columns) of all rows, by their panel.
template <int NV>
inline void rows_of_panel(const Gemm& g, const float* panel, int64_t n, int columns) {
  constexpr int MR = FXOPT_VECTOR_BYTES == 64 ? 12 : 6;
  int64_t m = 0;
  for (; m + MR <= g.M; m += MR) panel_tile<MR, NV>(g, panel, m, n, columns);
  for (; m + 4 <= g.M; m += 4) panel_tile<4, NV>(g, panel, m, n, columns);
  for (; m < g.M; m++) panel_tile<1, NV>(g, panel, m, n, columns);
}

template <int NV>
inline void panel_columns(const Gemm& g, int64_t n, int columns) {
  alignas(64) float panel[kTurnedK * NV * kLanes];
  turn<NV>(g, n, columns, panel);
  rows_of_panel<NV>(g, panel, n, columns);
}

// The same by panels; K <= kTurnedK.
inline void gemm_by_panels(const Gemm& g, int64_t n0, int64_t n1) {
  int64_t n = n0;
  for (; n + kLanes < n1; n += 2 * kLanes) panel_columns<2>(g, n, n1 - n < 2 * kLanes ? int(n1 - n) : 2 * kLanes);
  if (n1 - n > kLanes / 4) panel_columns<1>(g, n, int(n1 - n));
  else if (n < n1) gemm_by_dots(g, n, n1);
}

// Columns [n0, n1) of all rows of y, by whichever is faster.
inline void gemm(const Gemm& g, int64_t n0, int64_t n1) {
  if (g.M >= kTurnedRows && g.K <= kTurnedK) gemm_by_panels(g, n0, n1);
  else gemm_by_dots(g, n0, n1);
}

}  // namespace fxopt::FXOPT_ISA
