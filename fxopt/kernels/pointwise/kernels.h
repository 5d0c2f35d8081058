// One step on one block. Compiled once per instruction set.
#pragma once
#include "../simd/math.h"
#include "gather.h"
#include "layout.h"
#include "reduce.h"

namespace fxopt::FXOPT_ISA {

inline Floats at(const Block& block, int64_t i) { return load(block.data + (i & block.advance)); }
inline Floats at(const Block& block, int64_t i, int n) { return load(block.data + (i & block.advance), n); }

template <class F, class... B>
inline void each(float* to, int64_t n, F f, const B&... blocks) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, f(at(blocks, i)...));
  if (i < n) store(to + i, f(at(blocks, i, int(n - i))...), int(n - i));
}

inline Floats truth(Ints mask) { return from_bits(mask & 0x3f800000); }

inline bool unary(int64_t op, float* to, const Block& a, int64_t n) {
  const auto run = [&](auto f) {
    each(to, n, f, a);
    return true;
  };
  switch (op) {
    case kCopy: return run([](Floats x) { return x; });
    case kNeg: return run([](Floats x) { return -x; });
    case kAbs: return run([](Floats x) { return abs(x); });
    case kExp: return run([](Floats x) { return exp(x); });
    case kLog: return run([](Floats x) { return log(x); });
    case kLog1p: return run([](Floats x) { return log1p(x); });
    case kTanh: return run([](Floats x) { return tanh(x); });
    case kSigmoid: return run([](Floats x) { return sigmoid(x); });
    case kSilu: return run([](Floats x) { return silu(x); });
    case kGelu: return run([](Floats x) { return gelu(x); });
    case kErf: return run([](Floats x) { return erf(x); });
    case kRelu: return run([](Floats x) { return x < 0.0f ? Floats{} : x; });
    case kSqrt: return run([](Floats x) { return sqrt(x); });
    case kRsqrt: return run([](Floats x) { return 1.0f / sqrt(x); });
    case kReciprocal: return run([](Floats x) { return 1.0f / x; });
    case kSquare: return run([](Floats x) { return x * x; });
    case kSoftplus: return run([](Floats x) { return softplus(x); });
    case kNot: return run([](Floats x) { return 1.0f - x; });
    case kIsNan: return run([](Floats x) { return truth(x != x); });
    default: return false;
  }
}

inline bool binary(int64_t op, float* to, const Block& a, const Block& b, int64_t n) {
  const auto run = [&](auto f) {
    each(to, n, f, a, b);
    return true;
  };
  switch (op) {
    case kAdd: return run([](Floats x, Floats y) { return x + y; });
    case kSub: return run([](Floats x, Floats y) { return x - y; });
    case kMul: return run([](Floats x, Floats y) { return x * y; });
    case kDiv: return run([](Floats x, Floats y) { return x / y; });
    case kMaximum: case kClampMin: return run([](Floats x, Floats y) { return maximum(x, y); });
    case kMinimum: case kClampMax: return run([](Floats x, Floats y) { return minimum(x, y); });
    case kLt: return run([](Floats x, Floats y) { return truth(x < y); });
    case kLe: return run([](Floats x, Floats y) { return truth(x <= y); });
    case kGt: return run([](Floats x, Floats y) { return truth(x > y); });
    case kGe: return run([](Floats x, Floats y) { return truth(x >= y); });
    case kEq: return run([](Floats x, Floats y) { return truth(x == y); });
    case kNe: return run([](Floats x, Floats y) { return truth(x != y); });
    case kAnd: return run([](Floats x, Floats y) { return truth((x != 0.0f) & (y != 0.0f)); });
    case kOr: return run([](Floats x, Floats y) { return truth((x != 0.0f) | (y != 0.0f)); });
    case kXor: return run([](Floats x, Floats y) { return truth((x != 0.0f) ^ (y != 0.0f)); });
    case kLeakyRelu: case kPrelu: return run([](Floats x, Floats slope) { return x > 0.0f ? x : x * slope; });
    default: return false;
  }
}

static void elementwise(int64_t op, float* to, const Block* operands, int64_t n) {
  if (unary(op, to, operands[0], n) || binary(op, to, operands[0], operands[1], n)) return;
  if (op == kFma) each(to, n, [](Floats a, Floats b, Floats c) { return fma(a, b, c); }, operands[0], operands[1], operands[2]);
  if (op == kWhere) each(to, n, [](Floats mask, Floats a, Floats b) { return mask != 0.0f ? a : b; }, operands[0], operands[1], operands[2]);
}

extern const Kernels kernels = {elementwise, reduce, gather};

}  // namespace fxopt::FXOPT_ISA
