// What one call hands to the kernels: where the vectors of a batch row lie, and what is made of them.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

// B rows of F vectors of D floats. Vector f of row b starts at data[f] + b * row[f]; its floats are lane[f] apart.
struct Fields {
  float* const* data;
  const int64_t* row;
  const int64_t* lane;
  int64_t B, F, D;
};

// Results at, at + 1, ... are the products of vector i with the vectors j, j + 1, ...
struct Run {
  int32_t i, j, count, at;
};

// out[b, run.at + k] = <x[b, run.i], x[b, run.j + k]>, rows `width` apart. Stores may reach `n`, the end of the results.
struct Dot {
  Fields x;
  const Run* runs;
  int64_t n_runs, n;
  float* out;
  int64_t width;
};

// The gradient of x from that of the results, `grad` in place of `out`.
struct DotBackward {
  Fields x, grad_x;
  const Run* runs;
  int64_t n_runs;
  const float* grad;
  int64_t width;
};

// out[b] = scale * sum over i < j of w_i x_i w_j x_j, lane by lane [B, D], or summed over lanes too [B].
struct PairSum {
  Fields x;
  const float* weights;  // [B, F] with strides, or null
  int64_t weights_row, weights_field;
  float scale;
  bool total;
  float* out;
};

// The gradients of x [B, F, D] and of the weights [B, F], contiguous, from that of the result. Either may be null.
struct PairSumBackward {
  PairSum forward;
  const float* grad;  // [B, D], or [B]
  int64_t grad_row, grad_lane;
  float* grad_x;
  float* grad_weights;
};

// For the products p of the pairs of `runs`, `n` in all: scores = softmax over p of <query, relu(weight p + bias)>, [B, n],
// and pooled = the products weighted by them, [B, D].
struct Attention {
  Fields x;
  const Run* runs;
  int64_t n_runs, n;
  const float* weight;  // [D, units], contiguous, units a multiple of kUnits and 0 from the A-th on
  const float* bias;    // [units]
  const float* query;   // [units]
  int64_t A, units;
  float* pooled;
  float* scores;
};
constexpr int kUnits = 8;

// scratch(count): floats of this thread, valid until it asks again.
struct Kernels {
  void (*dot)(const Dot&, int64_t row0, int64_t row1, float* (*scratch)(int64_t count));
  void (*dot_backward)(const DotBackward&, int64_t row0, int64_t row1, float* (*scratch)(int64_t count));
  void (*attention)(const Attention&, int64_t row0, int64_t row1, float* (*scratch)(int64_t count));
  void (*pair_sum)(const PairSum&, int64_t row0, int64_t row1);
  void (*pair_sum_backward)(const PairSumBackward&, int64_t row0, int64_t row1);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
