// The sum of the products of all pairs of a row's vectors in one pass: each vector times the sum of those before it,
// which loses nothing to cancellation as (sum x)^2 - sum x^2 does.
#pragma once
#include "fields.h"

namespace fxopt::FXOPT_ISA {

inline float weight_of(const PairSum& job, int64_t b, int64_t f) {
  return job.weights ? job.weights[b * job.weights_row + f * job.weights_field] : 1.0f;
}

static void pair_sum(const PairSum& job, int64_t row0, int64_t row1) {
  const Fields& x = job.x;
  for (int64_t b = row0; b < row1; b++) {
    Floats all{};
    for (int64_t d = 0; d < x.D; d += kLanes) {
      Floats before{}, pairs{};
      for (int64_t f = 0; f < x.F; f++) {
        const Floats v = lanes_of(x, b, f, d) * splat(weight_of(job, b, f));
        pairs = fma(v, before, pairs);
        before += v;
      }
      if (job.total) all += pairs;
      else store_part(job.out + b * x.D + d, pairs * splat(job.scale), x.D - d);
    }
    if (job.total) job.out[b] = sum(all) * job.scale;
  }
}

// The gradient for w_f x_f is that of the result times the sum of the other vectors.
static void pair_sum_backward(const PairSumBackward& job, int64_t row0, int64_t row1) {
  const PairSum& forward = job.forward;
  const Fields& x = forward.x;
  const Fields grads{const_cast<float* const*>(&job.grad), &job.grad_row, &job.grad_lane, x.B, 1, x.D};
  for (int64_t b = row0; b < row1; b++) {
    if (job.grad_weights) memset(job.grad_weights + b * x.F, 0, size_t(x.F) * sizeof(float));
    for (int64_t d = 0; d < x.D; d += kLanes) {
      Floats all{};
      for (int64_t f = 0; f < x.F; f++) all = fma(lanes_of(x, b, f, d), splat(weight_of(forward, b, f)), all);
      const Floats grad = forward.total ? splat(job.grad[b * job.grad_row]) : lanes_of(grads, b, 0, d);
      const Floats scaled = grad * splat(forward.scale);
      for (int64_t f = 0; f < x.F; f++) {
        const Floats v = lanes_of(x, b, f, d), w = splat(weight_of(forward, b, f)), own = scaled * (all - w * v);
        if (job.grad_weights) job.grad_weights[b * x.F + f] += sum(own * v);
        if (job.grad_x) store_part(job.grad_x + (b * x.F + f) * x.D + d, own * w, x.D - d);
      }
    }
  }
}

}  // namespace fxopt::FXOPT_ISA
