// The gradient of a linear layer's result from that of what follows it, beside it turned over and its sums: all that
// the layer's own gradients are products of, in one pass over memory. torch takes one each, and turns over on one
// thread: [1024, 512] takes 270 us by torch and 87 here, on two threads (AMD, AVX-512).
#pragma once
#include "../simd/transpose.h"
#include "chain.h"

namespace fxopt::FXOPT_ISA {

// Rows whose pages a TLB holds: a whole column of [4096, 1024] takes 3 times as long. They are added up by themselves, as
// the error of one long sum grows with its length.
constexpr int64_t kBlock = 128;

// From the gradient of f(x) to that of x, by y = f(x), as torch computes them.
template <Op op>
[[gnu::always_inline]] inline Floats through(Floats grad, Floats y) {
  if constexpr (op == kRelu) return y <= 0.0f ? Floats{} : grad;
  else if constexpr (op == kSigmoid) return grad * (1.0f - y) * y;
  else if constexpr (op == kTanh) return grad * (1.0f - y * y);
  else return grad;
}

// Columns [n, n + kLanes) of rows [m, m + kLanes); their sums are returned.
template <Op op>
[[gnu::always_inline]] inline Floats gradient_square(const Gradient& g, int64_t m, int64_t n) {
  const int64_t rows = g.M - m, columns = g.N - n;
  Floats v[kLanes], sum{};
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; r++) {
    v[r] = Floats{};
    if (r >= rows) continue;
    v[r] = load_part(g.grad + (m + r) * g.grad_stride + n, columns);
    if constexpr (op != kLinear) v[r] = through<op>(v[r], load_part(g.y + (m + r) * g.y_stride + n, columns));
    sum += v[r];
  }
#pragma GCC unroll 16
  for (int r = 0; op != kLinear && r < kLanes; r++)
    if (r < rows) store_part(g.through + (m + r) * g.N + n, v[r], columns);
  transpose(v);
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; r++)
    if (r < columns) store_part(g.turned + (n + r) * g.M + m, v[r], rows);
  return sum;
}

template <Op op>
inline void gradient_columns(const Gradient& g, int64_t n0, int64_t n1) {
  for (int64_t n = n0; n < n1; n++) g.sums[n] = 0.0f;
  for (int64_t m0 = 0; m0 < g.M; m0 += kBlock) {
    for (int64_t n = n0; n < n1; n += kLanes) {
      Floats sum{};
      for (int64_t m = m0; m < m0 + kBlock && m < g.M; m += kLanes) sum += gradient_square<op>(g, m, n);
      store_part(g.sums + n, load_part(g.sums + n, g.N - n) + sum, g.N - n);
    }
  }
}

// Columns [n0, n1): n0 is a multiple of kLanes.
static void gradient(const Gradient& g, int64_t n0, int64_t n1) {
  switch (g.op) {
    case kRelu: return gradient_columns<kRelu>(g, n0, n1);
    case kSigmoid: return gradient_columns<kSigmoid>(g, n0, n1);
    case kTanh: return gradient_columns<kTanh>(g, n0, n1);
    default: return gradient_columns<kLinear>(g, n0, n1);
  }
}

}  // namespace fxopt::FXOPT_ISA
