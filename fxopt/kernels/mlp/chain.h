// A chain of steps as the kernels see it: a plan whose tensors are resolved.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

enum Op : int64_t {
  kLinear, kBatchNorm, kRelu, kSigmoid, kTanh, kSilu, kGelu, kGeluTanh, kLeakyRelu, kPrelu, kElu, kSoftplus, kClamp,
  kDice, kLayerNorm, kHardtanh, kOps,
};

// As plan.py encodes it.
struct Record {
  int64_t op, tensors[5];
  double constants[2];
};
static_assert(sizeof(Record) == 64);

// The step reads K columns and leaves N.
struct Step {
  Op op;
  int64_t N, K;
  const float* weight;  // of a linear
  int64_t weight_stride;
  bool across;  // its weight lies there as [K, N], not [N, K]
  const float* bias;
  const float *scale, *shift, *slope;  // of what follows one, [N]; null: absent
  bool one_slope;
  float a, b;
  float *before, *after;  // of a linear whose values are kept: as it gives them, and after the steps behind it
};

// [M, N] each, the distance between rows in elements; without y there is no step behind the layer (kLinear).
struct Gradient {
  const float *grad, *y;
  int64_t grad_stride, y_stride, M, N;
  Op op;
  float *through, *turned, *sums;  // [M, N] where there is a y, [N, M], [N]
};

// Strides in elements; the last dim is dense.
struct Kernels {
  // Columns [n0, n1) of a linear over M rows.
  void (*linear)(const Step& step, const float* x, int64_t x_stride, int64_t M, float* y, int64_t y_stride, int64_t n0, int64_t n1);
  // Any other step, in place.
  void (*pointwise)(const Step& step, float* y, int64_t M, int64_t y_stride);
  void (*gradient)(const Gradient& g, int64_t n0, int64_t n1);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
