// What is left of long dot products that were cut in parts, and the layer of one output behind them.
#pragma once
#include "short.cuh"

namespace fxopt::linear {

struct Last {
  Short layer;                 // its `out` is not used
  const float *vector, *bias;  // [n], and one or null
  float* out;                  // [m]
  int64_t activation;
};

// A warp a row, four columns a thread at a time.
__global__ void __launch_bounds__(kThreads) last_kernel(const __grid_constant__ Last last) {
  in_turn();
  const Short& s = last.layer;
  const int thread = int(threadIdx.x) & 31, row = int(blockIdx.x) * (kThreads / 32) + (int(threadIdx.x) >> 5);
  if (row >= s.m) return;
  float found[1] = {};
  for (int n = thread * 4; n < s.n; n += 128) {
    float4 partial[kMostParts] = {};
#pragma unroll
    for (int part = 0; part < kMostParts; part++)
      if (part < s.parts) partial[part] = __ldg(reinterpret_cast<const float4*>(s.partial + (int64_t(part) * s.m + row) * s.n + n));
    const float4 vector = __ldg(reinterpret_cast<const float4*>(last.vector + n));
    float sums[4];
#pragma unroll
    for (int d = 0; d < 4; d++) sums[d] = s.bias ? load<Float>(s.bias, n + d) : 0.0f;
    for (int k = 0; k < s.k; k++) {
      const float x = load<Float>(s.x, row * s.x_stride + k);
#pragma unroll
      for (int d = 0; d < 4; d++) sums[d] = fmaf(x, load<Float>(s.weight, (n + d) * s.weight_stride + k), sums[d]);
    }
#pragma unroll
    for (int part = 0; part < kMostParts; part++) {
      sums[0] += partial[part].x;
      sums[1] += partial[part].y;
      sums[2] += partial[part].z;
      sums[3] += partial[part].w;
    }
    activate(sums, s.activation);
    found[0] = fmaf(sums[3], vector.w, fmaf(sums[2], vector.z, fmaf(sums[1], vector.y, fmaf(sums[0], vector.x, found[0]))));
  }
  found[0] = summed(found[0]);
  if (thread) return;
  if (last.bias) found[0] += __ldg(last.bias);
  activate(found, int(last.activation));
  last.out[row] = found[0];
}

}  // namespace fxopt::linear
