// The steps, compiled once per instruction set.
#pragma once
#include "../simd/math.h"
#include "across.h"
#include "gradient.h"

namespace fxopt::FXOPT_ISA {

inline void linear(const Step& step, const float* x, int64_t x_stride, int64_t M, float* y, int64_t y_stride, int64_t n0, int64_t n1) {
  const Gemm product{x, x_stride, M, step.K, step.weight, step.weight_stride, step.bias, y, y_stride};
  if (step.across) across(product, n0, n1);
  else gemm(product, n0, n1);
}

// f(values, column, how many of them count) for every vector of a row. Written out once: most of the time to compile.
template <class F>
[[gnu::always_inline]] inline void each(float* row, int64_t N, F f) {
  for (int64_t n = 0; n < N; n += kLanes) {
    const int count = N - n < kLanes ? int(N - n) : kLanes;
    store_part(row + n, f(load_part(row + n, count), n, count), count);
  }
}

inline Floats gelu_tanh(Floats x) {
  const Floats inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

inline Floats elu(Floats x, float alpha) {
  const Floats e = exp(x) - 1.0f;  // for |x| small: a Taylor polynomial
  const Floats near = x + x * x * (0.5f + x * (0.16666667f + x * (0.041666668f + x * 0.008333334f)));
  return x > 0.0f ? x : alpha * (x > -0.1f ? near : e);
}

// The row minus its mean over its standard deviation; two passes, as the error asks for.
inline void normalize(const Step& step, float* row) {
  Floats total{};
  each(row, step.N, [&](Floats x, int64_t, int) { total += x; return x; });
  const float mean = sum(total) / float(step.N);
  Floats squares{};
  each(row, step.N, [&](Floats x, int64_t, int count) {
    const Floats d = x - mean;
    if (count == kLanes) squares = fma(d, d, squares);
    else for (int k = 0; k < count; k++) squares[k] += d[k] * d[k];
    return x;
  });
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / float(step.N) + step.a);
  each(row, step.N, [&](Floats x, int64_t n, int count) {
    Floats y = (x - mean) * scale;
    if (step.scale) y *= load_part(step.scale + n, count);
    return step.shift ? y + load_part(step.shift + n, count) : y;
  });
}

inline void pointwise_row(const Step& s, float* row) {
  const int64_t N = s.N;
  switch (s.op) {
    case kBatchNorm:
      return each(row, N, [&](Floats x, int64_t n, int c) { return fma(x, load_part(s.scale + n, c), load_part(s.shift + n, c)); });
    case kRelu: return each(row, N, [](Floats x, int64_t, int) { return x < 0.0f ? Floats{} : x; });
    case kSigmoid: return each(row, N, [](Floats x, int64_t, int) { return sigmoid(x); });
    case kTanh: return each(row, N, [](Floats x, int64_t, int) { return tanh(x); });
    case kSilu: return each(row, N, [](Floats x, int64_t, int) { return silu(x); });
    case kGelu: return each(row, N, [](Floats x, int64_t, int) { return gelu(x); });
    case kGeluTanh: return each(row, N, [](Floats x, int64_t, int) { return gelu_tanh(x); });
    case kLeakyRelu: return each(row, N, [&](Floats x, int64_t, int) { return x > 0.0f ? x : x * s.a; });
    case kPrelu:
      if (s.one_slope) return each(row, N, [&](Floats x, int64_t, int) { return x > 0.0f ? x : x * s.slope[0]; });
      return each(row, N, [&](Floats x, int64_t n, int c) { return x > 0.0f ? x : x * load_part(s.slope + n, c); });
    case kElu: return each(row, N, [&](Floats x, int64_t, int) { return elu(x, s.a); });
    case kSoftplus: return each(row, N, [](Floats x, int64_t, int) { return softplus(x); });
    case kClamp:
    case kHardtanh:
      return each(row, N, [&](Floats x, int64_t, int) {
        const Floats most = x > s.b ? splat(s.b) : x;
        return most < s.a ? splat(s.a) : most;
      });
    case kDice:
      return each(row, N, [&](Floats x, int64_t n, int c) {
        const Floats p = sigmoid(fma(x, load_part(s.scale + n, c), load_part(s.shift + n, c)));
        const Floats slope = s.one_slope ? splat(s.slope[0]) : load_part(s.slope + n, c);
        return slope * (1.0f - p) * x + p * x;
      });
    case kLayerNorm: return normalize(s, row);
    default: return;
  }
}

inline void pointwise(const Step& step, float* y, int64_t M, int64_t y_stride) {
  for (int64_t m = 0; m < M; m++) pointwise_row(step, y + m * y_stride);
}

extern const Kernels kernels = {linear, pointwise, gradient};

}  // namespace fxopt::FXOPT_ISA
