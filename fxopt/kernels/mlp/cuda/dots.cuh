// Dot products one by one: a layer of one output reads many rows of x, a layer on one row those of its weight.
#pragma once
#include "short.cuh"

namespace fxopt::linear {

constexpr int kDotThreads = 256, kDotWarps = kDotThreads / 32;

struct Dots {
  const void *rows, *vector, *bias;  // [m, k], [k], [m] or one
  void* out;                         // [m]
  int64_t stride, bias_stride;
  int32_t m, k, activation;
};

template <class Bits, int SIZE>
__device__ __forceinline__ Vector<Bits, SIZE> fetched(const Bits* from) {
  Vector<Bits, SIZE> found;
  if constexpr (SIZE == 1) {
    found.value[0] = __ldg(from);
  } else {
    static_assert(SIZE * sizeof(Bits) == sizeof(uint4));
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    memcpy(&found, &four, sizeof four);
  }
  return found;
}

// out[m] = activation(rows[m] . vector + bias[m]): WARPS warps ROWS rows, each thread with AHEAD loads of SIZE values of
// a row on their way, which the compiler only keeps for few blocks a multiprocessor.
template <class T, int SIZE, int WARPS, int ROWS, int AHEAD>
__global__ void __launch_bounds__(kDotThreads, AHEAD == 1 ? 5 : 2) dot_kernel(const Dots d) {
  in_turn();
  using Bits = typename T::Bits;
  constexpr int kTogether = WARPS * 32;
  __shared__ float by_warp[kDotWarps][ROWS];
  const int thread = int(threadIdx.x), own = thread % kTogether, first = (int(blockIdx.x) * (kDotWarps / WARPS) + thread / kTogether) * ROWS;
  if (WARPS == 1 && first >= d.m) return;  // the whole warp
  const auto* vector = static_cast<const Bits*>(d.vector);
  const Bits* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) rows[r] = static_cast<const Bits*>(d.rows) + row_or_last(first + r, d.m) * d.stride;
  float sums[ROWS] = {};
  for (int k0 = 0; k0 < d.k; k0 += AHEAD * kTogether * SIZE) {
    const int k = k0 + own * SIZE;
    Vector<Bits, SIZE> left[ROWS][AHEAD], right[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int at = k + u * kTogether * SIZE, safe = at < d.k ? at : d.k - SIZE;  // read anyway, so that no load waits for another
      right[u] = fetched<Bits, SIZE>(vector + safe);
#pragma unroll
      for (int r = 0; r < ROWS; r++) left[r][u] = fetched<Bits, SIZE>(rows[r] + safe);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float some = 0;
#pragma unroll
        for (int v = 0; v < SIZE; v++) some = fmaf(T::wide(left[r][u].value[v]), T::wide(right[u].value[v]), some);
        sums[r] += k + u * kTogether * SIZE < d.k ? some : 0.0f;
      }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) sums[r] = summed(sums[r]);
  float found[1] = {sums[0]};
  if constexpr (WARPS > 1) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (own % 32 == 0) by_warp[thread / 32][r] = sums[r];
    __syncthreads();
    if (thread >= ROWS) return;
    found[0] = by_warp[0][thread];
    for (int w = 1; w < WARPS; w++) found[0] += by_warp[w][thread];
  } else if (own) {
    return;
  }
  const int row = WARPS > 1 ? first + thread : first;
  if (row >= d.m) return;
  if (d.bias) found[0] += load<T>(d.bias, row * d.bias_stride);
  activate(found, d.activation);
  static_cast<Bits*>(d.out)[row] = T::rounded(found[0]);
}

}  // namespace fxopt::linear
