// Products of a few rows, found by their pointers, with a packed matrix that is in the cache.
#pragma once
#include "../simd/softmax.h"
#include "job.h"

namespace fxopt::target::FXOPT_ISA {

using namespace fxopt::FXOPT_ISA;

// Accumulators fill the registers: 32 with AVX-512, 16 else.
constexpr bool kWide = FXOPT_VECTOR_BYTES == 64;
constexpr int kMostVectors = kWide ? 4 : 2;
template <int NV> constexpr int kRows = kWide ? (NV == 4 ? 6 : NV == 3 ? 8 : 12) : (NV == 2 ? 5 : 10);
constexpr int64_t kSlack = 12;  // rows that rounding up to kRows may write behind the last

// c[r] = start + a[r] B for R rows and NV vectors of outputs; start == nullptr adds to what c holds.
template <int R, int NV>
[[gnu::always_inline]] inline void block(
    const float* const* a, int64_t K, const float* b, int64_t ldb, float* c, int64_t ldc, const float* start) {
  Floats sum[R][NV];  // in registers, if the loops over it are unrolled, which -O2 leaves to the pragmas
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sum[r][v] = load(start ? start + v * kLanes : c + r * ldc + v * kLanes);
  for (int64_t k = 0; k < K; k++) {
    Floats right[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) right[v] = load(b + k * ldb + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Floats left = splat(a[r][k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + r * ldc + v * kLanes, sum[r][v]);
}

template <int NV>
[[gnu::noinline]] static void panel(
    const float* const* a, int64_t rows, int64_t K, const float* b, int64_t ldb, float* c, int64_t ldc, const float* start) {
  constexpr int R = kRows<NV>, kHalf = R / 2;
  int64_t r = 0;
  for (; rows - r > kHalf; r += R) block<R, NV>(a + r, K, b, ldb, c + r * ldc, ldc, start);
  if (r < rows) block<kHalf, NV>(a + r, K, b, ldb, c + r * ldc, ldc, start);
}

// a: `rows` pointers and kSlack more that may be read.
static void multiply(const float* const* a, int64_t rows, const Packed& b, float* c, int64_t ldc, const float* start) {
  const int64_t ldb = padded(b.N), vectors = (b.N + kLanes - 1) / kLanes;
  const int64_t panels = (vectors + kMostVectors - 1) / kMostVectors;
  for (int64_t p = 0, from = 0; p < panels; p++) {
    const int64_t to = vectors * (p + 1) / panels, at = from * kLanes;
    const float* first = start ? start + at : nullptr;
    switch (to - from) {
      case 1: panel<1>(a, rows, b.K, b.data + at, ldb, c + at, ldc, first); break;
      case 2: panel<2>(a, rows, b.K, b.data + at, ldb, c + at, ldc, first); break;
      case 3: panel<kWide ? 3 : 1>(a, rows, b.K, b.data + at, ldb, c + at, ldc, first); break;
      default: panel<kWide ? 4 : 1>(a, rows, b.K, b.data + at, ldb, c + at, ldc, first);
    }
    from = to;
  }
}

}  // namespace fxopt::target::FXOPT_ISA
