// Layers of up to 128 outputs on a tile of 32 rows, in fp32 on the CUDA cores: between two layers the rows stay in shared
// memory. Thread t of a warp has rows t % 8 * 4 to + 3; a warp 16 columns, and those 64 further on.
#pragma once
#include "../floats.cuh"

namespace fxopt::tile {

constexpr int kThreads = 128, kRows = 32, kMost = 128, kChunk = 16;  // kMost: columns
constexpr int kPad = 4;  // floats: neighbouring columns on other banks, and still 16 bytes
constexpr int kGroups = 2, kGroupColumns = 64;

struct Memory {
  float rows[kMost][kRows + kPad];      // what a layer reads and leaves, by column
  float weight[kChunk][kMost + kPad];   // by input
  float inputs[kChunk][kRows + kPad];   // of the first layer
};

using Sums = float[kGroups][4][4];  // by group, column, row

__device__ __forceinline__ int row_of(int thread) { return (thread & 7) * 4; }
__device__ __forceinline__ int column_of(int thread, int group) { return group * kGroupColumns + (thread >> 5) * 16 + (thread & 31) / 8 * 4; }

// A thread's part of a chunk of weights: one input, every kStep-th output.
constexpr int kStep = kThreads / kChunk, kWeights = kMost / kStep;

// weights += factor times those of one input, at `from` and every stride-th element.
template <class T>
__device__ __forceinline__ void add_weights(const void* from, int64_t at, int64_t stride, int N, float factor, float (&weights)[kWeights]) {
  const int own = int(threadIdx.x) / kChunk;
  const auto* next = static_cast<const typename T::Bits*>(from) + at + own * stride;
#pragma unroll
  for (int j = 0; j < kWeights; j++, next += kStep * stride)
    if (own + j * kStep < N) weights[j] = fmaf(factor, T::wide(__ldg(next)), weights[j]);
}

// sums += inputs times weight, K inputs and N columns. add(k, weights) adds the weights of input k; the inputs are
// input(row, k) in the first layer and memory.rows in the others. Everybody has read memory.rows when it returns.
template <class Input, class Add>
__device__ __forceinline__ void multiply(Memory& memory, int N, int K, bool first, Input input, Add add, Sums& sums) {
  constexpr int kInputs = kRows / kStep;
  const int thread = int(threadIdx.x), k_own = thread % kChunk, own = thread / kChunk, padded = (N + 15) / 16 * 16;
  float weights[kWeights], values[kInputs];
  const auto fetch = [&](int k) {
#pragma unroll
    for (int j = 0; j < kWeights; j++) weights[j] = 0;
    if (k < K) add(k, weights);
#pragma unroll
    for (int j = 0; j < kInputs; j++) values[j] = first && k < K ? input(own + j * kStep, k) : 0.0f;
  };
  fetch(k_own);
  for (int k0 = 0; k0 < K; k0 += kChunk) {
#pragma unroll
    for (int j = 0; j < kWeights; j++)
      if (own + j * kStep < padded) memory.weight[k_own][own + j * kStep] = weights[j];
#pragma unroll
    for (int j = 0; j < kInputs; j++) memory.inputs[k_own][own + j * kStep] = values[j];
    __syncthreads();
    if (k0 + kChunk < K) fetch(k0 + kChunk + k_own);  // while the others multiply
    const float(*left)[kRows + kPad] = first ? memory.inputs : memory.rows + k0;
    const int ks = K - k0 < kChunk ? K - k0 : kChunk;
#pragma unroll 4
    for (int k = 0; k < ks; k++) {
      const float4 a = *reinterpret_cast<const float4*>(left[k] + row_of(thread));
      const float by_row[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
        if (column_of(thread & ~31, g) >= N) continue;  // the whole warp
        const float4 w = *reinterpret_cast<const float4*>(memory.weight[k] + column_of(thread, g));
        const float by_column[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
          for (int r = 0; r < 4; r++) sums[g][c][r] = fmaf(by_row[r], by_column[c], sums[g][c][r]);
      }
    }
    __syncthreads();  // before the next chunk comes over this one
  }
}

// Puts f(column, four rows of sums) where the next layer reads it.
template <class F>
__device__ __forceinline__ void finish(Memory& memory, int N, const Sums& sums, F f) {
  const int thread = int(threadIdx.x);
#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float* to = memory.rows[column_of(thread, g) + c] + row_of(thread);
      *reinterpret_cast<float4*>(to) = float4{sums[g][c][0], sums[g][c][1], sums[g][c][2], sums[g][c][3]};
    }
#pragma unroll 1
  for (int k = 0; k < kGroups * 4; k++) {  // by memory, so that f is compiled once
    const int n = column_of(thread, k / 4) + k % 4;
    if (n >= N) continue;
    float4& four = *reinterpret_cast<float4*>(memory.rows[n] + row_of(thread));
    float values[4] = {four.x, four.y, four.z, four.w};
    f(n, values);
    four = float4{values[0], values[1], values[2], values[3]};
  }
}

// As torch computes them in fp32.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

}  // namespace fxopt::tile
