// Layers of up to 128 outputs on a tile of 16 rows, in fp32 on the CUDA cores. The weights come in pieces of up to 512 bytes
// an output, two on their way or in use, whatever layer they are of. A warp has 64 columns and a slice of a piece's inputs,
// its thread rows lane / 8 * 4 to + 3 and every 8th column; the sums of the slices are added in shared memory.
#pragma once
#include "../../columns/cuda/async.cuh"
#include "../../floats.cuh"
#include "../../grid.cuh"

namespace fxopt::tile {

constexpr int kWarps = 8, kThreads = kWarps * 32, kRows = 16, kMost = 128, kGroup = 64;  // kMost, kGroup: columns
constexpr int kPad = 16;  // bytes: neighbouring outputs on other banks
constexpr int kWeightBytes = kMost * (256 + kPad), kInputBytes = kRows * (512 + kPad);
constexpr int kSumPitch = kRows + 4;

// Of a layer of N outputs, in elements.
template <class T>
__device__ __forceinline__ int piece_of(int N) {
  return (N > kGroup ? 256 : 512) / int(sizeof(typename T::Bits));
}
template <class T>
__device__ __forceinline__ int pitch_of(int N) {
  return piece_of<T>(N) + kPad / int(sizeof(typename T::Bits));
}

struct alignas(16) Piece {
  char weights[kWeightBytes];  // by output
  char inputs[kInputBytes];    // of the first layer, by row
};
struct Memory {
  Piece pieces[2];              // and the sums of a layer, over its last
  float rows[kRows][kMost + 4]; // what a layer leaves
};
static_assert(sizeof(Piece) >= kWarps * kGroup * kSumPitch * sizeof(float));
static_assert(kGroup * (512 + kPad) <= kWeightBytes && sizeof(Memory) <= 99 * 1024);  // sm_86's and sm_89's

using Sums = float[4][kGroup / 8];  // by row, column

__device__ __forceinline__ int row_of(int lane) { return lane / 8 * 4; }

// Inputs k0 to k0 + ks of some rows into shared memory, zeros up to the next multiple of 4; a barrier behind them.
template <class T>
__device__ __forceinline__ void fetch(void* memory, int pitch, const Operand& from, int first, int rows, int k0, int ks) {
  using Bits = typename T::Bits;
  constexpr int kVector = 16 / int(sizeof(Bits)), kAhead = 8;
  const int64_t down = from.strides[0], along = from.strides[1];
  const Bits* source = static_cast<const Bits*>(from.data) + first * down + k0 * along;
  Bits* to = static_cast<Bits*>(memory);
  const auto shift_for = [](int n) { return n > 1 ? 32 - __clz(n - 1) : 0; };  // a power of 2: no division
  if (along == 1 && ks % kVector == 0 && down % kVector == 0 && reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    const int shift = shift_for(ks / kVector);
    for (int item = int(threadIdx.x); item < rows << shift; item += kThreads) {
      const int row = item >> shift, k = (item & ((1 << shift) - 1)) * kVector;
      if (k < ks) cuda::copy_async(to + row * pitch + k, source + row * down + k, true);
    }
    return;
  }
  const int padded = (ks + 3) / 4 * 4;
  const bool turned = along != 1 && down == 1;  // neighbouring threads read what lies side by side
  const int shift = shift_for(turned ? rows : padded), items = (turned ? padded : rows) << shift;
  for (int base = int(threadIdx.x); base < items; base += kAhead * kThreads) {
    Bits some[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      const int outer = (base + j * kThreads) >> shift, inner = (base + j * kThreads) & ((1 << shift) - 1);
      const int row = turned ? inner : outer, k = turned ? outer : inner;
      some[j] = row < rows && k < ks ? __ldg(source + row * down + k * along) : T::rounded(0.0f);
    }
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      const int outer = (base + j * kThreads) >> shift, inner = (base + j * kThreads) & ((1 << shift) - 1);
      const int row = turned ? inner : outer, k = turned ? outer : inner;
      if (row < rows && k < padded) to[row * pitch + k] = some[j];
    }
  }
}

__device__ __forceinline__ void four(const float* from, float (&to)[4]) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
template <class T>
__device__ __forceinline__ void four(const typename T::Bits* from, float (&to)[4]) {
  if constexpr (sizeof(*from) == 4) {
    four(from, to);
  } else {
    struct alignas(8) Raw { typename T::Bits bits[4]; };
    const Raw raw = *reinterpret_cast<const Raw*>(from);
#pragma unroll
    for (int k = 0; k < 4; k++) to[k] = T::wide(raw.bits[k]);
  }
}

// sums += left times weights, for every step-th four of inputs; both point at this thread's first row and column.
template <class In, class T, int kColumns>
__device__ __forceinline__ void multiply(const typename In::Bits* left, int left_pitch, const typename T::Bits* weights, int pitch, int begin, int ks, int step, Sums& sums) {
#pragma unroll 1
  for (int k0 = begin * 4; k0 < ks; k0 += step * 4) {
    float x[4][4];
#pragma unroll
    for (int r = 0; r < 4; r++) four<In>(left + r * left_pitch + k0, x[r]);
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      float w[4];
      four<T>(weights + c * 8 * pitch + k0, w);
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) sums[r][c] = fmaf(x[r][k], w[k], sums[r][c]);
    }
  }
}

// The same for so many columns of this warp's.
template <class In, class T>
__device__ __forceinline__ void multiply(int columns, const typename In::Bits* left, int left_pitch, const typename T::Bits* weights, int pitch, int begin, int ks, int step, Sums& sums) {
  if (columns > 32) multiply<In, T, 8>(left, left_pitch, weights, pitch, begin, ks, step, sums);
  else if (columns > 8) multiply<In, T, 4>(left, left_pitch, weights, pitch, begin, ks, step, sums);
  else multiply<In, T, 1>(left, left_pitch, weights, pitch, begin, ks, step, sums);
}

}  // namespace fxopt::tile
