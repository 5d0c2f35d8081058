// What one call hands to the kernels: two sets of vectors a batch row, and the weights of their products.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

// F vectors of D floats a batch row: data[b * row + f * field + d * lane].
struct Vectors {
  const float* data;
  int64_t F, row, field, lane;
};

// out[b, o, d] = sum over h, m of weight[o, h * y.F + m] * x[b, h, d] * y[b, m, d]; out is contiguous [B, O, D].
// folded: x is y, and weight has a column for each h <= m only.
struct Compressed {
  Vectors x, y;
  const float* weight;  // [O, K], rows `stride` apart
  int64_t stride, K, O, D;
  bool folded;
  float* out;
};

// Rows b0 to b1, outputs o0 to o1. scratch(count): floats of this thread, valid until it asks again.
struct Kernels {
  void (*compress)(const Compressed&, int64_t b0, int64_t b1, int64_t o0, int64_t o1, float* (*scratch)(int64_t count));
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
