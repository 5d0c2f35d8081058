// The products x_h * y_m live in the first cache only, a few of them at a time: what a GEMM would read as its input
// [B * D, H * M] is never written. Vectors run over (batch row, d), so any D fills them.
#include "../simd/products.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int kOutputs = FXOPT_VECTOR_BYTES == 64 ? 8 : 4;  // x 3 vectors: sums in 24 of 32, or 12 of 16 registers
constexpr int kVectors = 3;
constexpr int64_t kProducts = 128;  // at a time: 24 KB of products and 4 KB of weights

// sum[o][v] += weight[o, 0..count) * products, for NO outputs and NV vectors.
template <int NO, int NV>
[[gnu::always_inline]] inline void tile(const float* weight, int64_t stride, const float* products, int64_t count, float* sums, int64_t width) {
  Floats sum[NO][NV] = {};
  add_products(weight, stride, 1, products, NV * kLanes, count, sum);
#pragma GCC unroll 8
  for (int o = 0; o < NO; o++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(sums + o * width + v * kLanes, load(sums + o * width + v * kLanes) + sum[o][v]);
}

template <int NV>
inline void outputs(const Compressed& c, int64_t o0, int64_t o1, int64_t k, int64_t count, const float* products, float* sums, int64_t width) {
  int64_t o = o0;
  for (; o + kOutputs <= o1; o += kOutputs, sums += kOutputs * width)
    tile<kOutputs, NV>(c.weight + o * c.stride + k, c.stride, products, count, sums, width);
  for (; o < o1; o++, sums += width) tile<1, NV>(c.weight + o * c.stride + k, c.stride, products, count, sums, width);
}

// Fields [F, width] of rows b0 to b1, each row's D floats one after the other; what is left of width is 0.
inline void gather(const Vectors& x, int64_t D, int64_t b0, int64_t b1, float* to, int64_t width) {
  for (int64_t f = 0; f < x.F; f++, to += width) {
    float* at = to;
    for (int64_t b = b0; b < b1; b++) {
      const float* from = x.data + b * x.row + f * x.field;
      for (int64_t d = 0; d < D; d++) *at++ = from[d * x.lane];
    }
    while (at < to + width) *at++ = 0;
  }
}

// Which pair a product is.
struct Pair {
  int64_t h, m;
  void next(const Compressed& c) {
    if (++m == c.y.F) h++, m = c.folded ? h : 0;
  }
};

template <int NV>
inline void multiply(const float* x, const float* y, int64_t width, const Compressed& c, Pair pair, int64_t count, float* products) {
  for (int64_t k = 0; k < count; k++, pair.next(c))
    for (int v = 0; v < NV; v++, products += kLanes)
      store(products, load(x + pair.h * width + v * kLanes) * load(y + pair.m * width + v * kLanes));
}

template <int NV>
inline void columns(const Compressed& c, const float* x, const float* y, int64_t o0, int64_t o1, float* products, float* sums, int64_t width) {
  Pair pair{0, 0};
  for (int64_t k = 0; k < c.K; k += kProducts) {
    const int64_t count = c.K - k < kProducts ? c.K - k : kProducts;
    multiply<NV>(x, y, width, c, pair, count, products);
    for (int64_t i = 0; i < count; i++) pair.next(c);
    outputs<NV>(c, o0, o1, k, count, products, sums, width);
  }
}

static void compress(const Compressed& c, int64_t b0, int64_t b1, int64_t o0, int64_t o1, float* (*scratch)(int64_t count)) {
  const int64_t count = (b1 - b0) * c.D, width = (count + kLanes - 1) / kLanes * kLanes;
  float* products = scratch(kProducts * kVectors * kLanes + (c.x.F + c.y.F + o1 - o0) * width);
  float *x = products + kProducts * kVectors * kLanes, *y = x + c.x.F * width, *sums = y + c.y.F * width;
  gather(c.x, c.D, b0, b1, x, width);
  if (c.folded) y = x;
  else gather(c.y, c.D, b0, b1, y, width);
  memset(sums, 0, size_t((o1 - o0) * width) * sizeof(float));
  int64_t at = 0;
  for (; at + kVectors * kLanes <= width; at += kVectors * kLanes) columns<kVectors>(c, x + at, y + at, o0, o1, products, sums + at, width);
  if (width - at == 2 * kLanes) columns<2>(c, x + at, y + at, o0, o1, products, sums + at, width);
  if (width - at == kLanes) columns<1>(c, x + at, y + at, o0, o1, products, sums + at, width);
  for (int64_t b = b0; b < b1; b++)
    for (int64_t o = o0; o < o1; o++)
      memcpy(c.out + (b * c.O + o) * c.D, sums + (o - o0) * width + (b - b0) * c.D, size_t(c.D) * sizeof(float));
}

const Kernels kernels = {compress};

}  // namespace fxopt::FXOPT_ISA
