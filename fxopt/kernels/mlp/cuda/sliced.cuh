// Layers of up to some hundred inputs and of few outputs in all, which leave cuBLAS idle: a block has 32 x 32 outputs, and
// each of its eight warps every eighth piece of 16 inputs. A warp fetches and multiplies its pieces without waiting for the
// others; their sums meet in shared memory. Lines may start at any float: they are copied by 4 bytes then.
#pragma once
#include "../../columns/cuda/async.cuh"
#include "../../gemm/tf32.cuh"
#include "short.cuh"

namespace fxopt::linear {

// out[m, n] = activation(x[m] . weight[n] + bias[n]), with factor addend[m, n] + factor[m, n] * that
struct Sliced {
  const float *x, *weight, *bias, *factor, *addend;
  float* out;  // [m, n]
  int32_t x_stride, weight_stride, factor_stride, addend_stride;
  int32_t m, n, k, activation, tf32, parts;  // parts: of all inputs, each k of them, and out is [parts, m, n]
};

constexpr int kTile = 32, kPiece = 16, kSlices = 8, kSliceThreads = kSlices * 32, kRowsEach = kTile / kSlices;
constexpr int kStages = 3, kStage = 2 * kTile * kPiece, kSumPitch = kTile + 8;  // kStage, kSumPitch: floats
static_assert(kTile * kSumPitch <= kStages * kStage);  // a warp's sums take the place of its inputs

// Where four neighbouring inputs of a line stand, so that neither neighbouring lines nor neighbouring fours share banks.
__device__ __forceinline__ int place(int line, int four) { return line * kPiece + ((four ^ line / 2) & 3) * 4; }

// Products in TF32 on tensor cores. A thread reads four neighbouring inputs at once and takes them as columns t and t + 4
// of two steps: the order of inputs is free, if it is one for both sides.
struct InTf32 {
  static __device__ __forceinline__ void multiply(const float* x, const float* weight, int lane, float (&sums)[kTile]) {
    const int at = place(lane / 4, lane % 4);
    tf32::Fragment<4, false> a[2][2];  // by rows, by step
    tf32::Fragment<2, false> b[4][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 low = *reinterpret_cast<const float4*>(x + at + i * 16 * kPiece), high = *reinterpret_cast<const float4*>(x + at + (i * 16 + 8) * kPiece);
      a[i][0].set(0, low.x), a[i][0].set(1, high.x), a[i][0].set(2, low.y), a[i][0].set(3, high.y);
      a[i][1].set(0, low.z), a[i][1].set(1, high.z), a[i][1].set(2, low.w), a[i][1].set(3, high.w);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float4 w = *reinterpret_cast<const float4*>(weight + at + j * 8 * kPiece);
      b[j][0].set(0, w.x), b[j][0].set(1, w.y);
      b[j][1].set(0, w.z), b[j][1].set(1, w.w);
    }
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) tf32::multiply<false>(*reinterpret_cast<float(*)[4]>(&sums[(i * 4 + j) * 4]), a[i][step], b[j][step]);
  }

  static __device__ __forceinline__ void put(float* to, int lane, const float (&sums)[kTile]) {
#pragma unroll
    for (int u = 0; u < kTile; u += 2)
      *reinterpret_cast<float2*>(to + (u / 16 * 16 + u % 4 / 2 * 8 + lane / 4) * kSumPitch + u / 4 % 4 * 8 + lane % 4 * 2) = float2{sums[u], sums[u + 1]};
  }
};

// Products in full fp32 on CUDA cores: a thread has every eighth row and every fourth column.
struct InFull {
  static __device__ __forceinline__ void multiply(const float* x, const float* weight, int lane, float (&sums)[kTile]) {
#pragma unroll
    for (int k = 0; k < kPiece / 4; k++) {
      float4 left[4];
#pragma unroll
      for (int i = 0; i < 4; i++) left[i] = *reinterpret_cast<const float4*>(x + place(lane % 8, k) + i * 8 * kPiece);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float4 right = *reinterpret_cast<const float4*>(weight + place(j * 4 + lane / 8, k));
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& sum = sums[i * 8 + j];
          sum = fmaf(left[i].w, right.w, fmaf(left[i].z, right.z, fmaf(left[i].y, right.y, fmaf(left[i].x, right.x, sum))));
        }
      }
    }
  }

  static __device__ __forceinline__ void put(float* to, int lane, const float (&sums)[kTile]) {
#pragma unroll
    for (int u = 0; u < kTile; u++) to[(u / 8 * 8 + lane % 8) * kSumPitch + u % 8 * 4 + lane / 8] = sums[u];
  }
};

// A warp's next kPiece inputs of a tile's lines, zeros behind the last input and the last line. ALIGNED: 16 bytes at a time;
// else 4, and then what counts is how many instructions an address takes.
template <bool ALIGNED, bool FULL>
__device__ __forceinline__ void fetch(const float* lines, int stride, int left, bool real, float* to, int lane) {
  constexpr int kAcross = ALIGNED ? 4 : kPiece, kAtOnce = 32 / kAcross;
  const int line = lane / kAcross;
#pragma unroll 4
  for (int first = 0; first < kTile; first += kAtOnce) {
    const bool there = real && (FULL || first + line < left);
    if constexpr (ALIGNED) cuda::copy_async(to + place(first + line, lane % 4), lines, there);
    else cuda::copy_async_few<4>(to + place(first + line, lane % kPiece / 4) + lane % 4, lines, there);
    lines += kAtOnce * stride;
  }
}

template <bool ALIGNED>
__device__ __forceinline__ void fetch(const float* data, int stride, int first, int count, int k, int inputs, float* to, int lane) {
  constexpr int kAcross = ALIGNED ? 4 : kPiece;
  k += lane % kAcross * (kPiece / kAcross);
  const float* lines = data + int64_t(first + lane / kAcross) * stride + k;
  if (count - first >= kTile) fetch<ALIGNED, true>(lines, stride, kTile, k < inputs, to, lane);
  else fetch<ALIGNED, false>(lines, stride, count - first, k < inputs, to, lane);
}

__device__ __forceinline__ void fetch(const float* data, int stride, int first, int count, int k, int inputs, float* to, int lane) {
  if ((reinterpret_cast<uint64_t>(data) % 16 | (stride | inputs) % 4) == 0) fetch<true>(data, stride, first, count, k, inputs, to, lane);
  else fetch<false>(data, stride, first, count, k, inputs, to, lane);
}

template <class Math>
__global__ void __launch_bounds__(kSliceThreads, 2) sliced_kernel(const __grid_constant__ Sliced s) {
  wait_for_stream();  // nobody starts early behind it: the next one's blocks would crowd where few of these are (MMoE: 2 us more)
  float* memory = reinterpret_cast<float*>(dynamic_shared());
  const int first_row = int(blockIdx.x) * kTile, first_column = int(blockIdx.y) * kTile;
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5, n = first_column + lane, first = int(blockIdx.z) * s.k;
  float *own = memory + warp * kStages * kStage, *stage = own;
  float sums[kTile] = {};
#pragma unroll 1
  for (int k0 = (warp - kStages * kSlices) * kPiece; k0 < s.k; k0 += kSlices * kPiece) {
    const int next = k0 + kStages * kSlices * kPiece;
    if (k0 >= 0) {
      cuda::wait_copies<kStages - 1>();
      __syncwarp();
      Math::multiply(stage, stage + kTile * kPiece, lane, sums);
      __syncwarp();
    }
    if (next < s.k) {
      fetch(s.x + first, s.x_stride, first_row, s.m, next, s.k, stage, lane);
      fetch(s.weight + first, s.weight_stride, first_column, s.n, next, s.k, stage + kTile * kPiece, lane);
    }
    cuda::commit_copies();
    stage = stage == own + (kStages - 1) * kStage ? own : stage + kStage;
  }
  float factor[kRowsEach], addend[kRowsEach];  // on their way while the sums meet
#pragma unroll
  for (int i = 0; i < kRowsEach; i++) {
    const int64_t m = row_or_last(first_row + i * kSlices + warp, s.m);
    if (s.factor) factor[i] = __ldg(s.factor + m * s.factor_stride + row_or_last(n, s.n)), addend[i] = __ldg(s.addend + m * s.addend_stride + row_or_last(n, s.n));
  }
  const float bias = s.bias ? __ldg(s.bias + row_or_last(n, s.n)) : 0.0f;
  Math::put(own, lane, sums);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowsEach; i++) {
    const int y = i * kSlices + warp, m = first_row + y;
    if (m >= s.m || n >= s.n) continue;
    float out[1] = {bias};
#pragma unroll
    for (int slice = 0; slice < kSlices; slice++) out[0] += memory[slice * kStages * kStage + y * kSumPitch + lane];
    activate(out, s.activation);
    s.out[(int64_t(blockIdx.z) * s.m + m) * s.n + n] = s.factor ? fmaf(factor[i], out[0], addend[i]) : out[0];
  }
}

template <class Math>
static const char* launch_sliced(const Sliced& s, void* stream) {
  const dim3 blocks(unsigned((s.m + kTile - 1) / kTile), unsigned((s.n + kTile - 1) / kTile), unsigned(s.parts));
  constexpr int kBytes = kSlices * kStages * kStage * int(sizeof(float));
  static_assert(kBytes <= 99 * 1024);  // sm_86's and sm_89's
  return launch(sliced_kernel<Math>, blocks, kSliceThreads, stream, s, kBytes);
}

}  // namespace fxopt::linear
