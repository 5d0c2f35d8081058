// Short dot products of halves, on tensor cores: a warp 16 * ROWS rows and 8 * COLUMNS columns, its fragments straight from
// global memory, so that an odd stride costs no padded copy, and nobody waits for a barrier.
#pragma once
#include "../../gemm/mma.cuh"
#include "short.cuh"

namespace fxopt::linear {

// Where a thread's four inputs of a fragment stand in a row, and which of them there are. What lies behind the last is read
// from the last and masked, because loads under a condition wait for each other: 0.6 us more a fragment.
struct Inputs {
  int at[4];
  uint32_t mask[2];

  __device__ __forceinline__ Inputs(int k, int size) {
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int own = k + u / 2 * 8 + u % 2;
      at[u] = own < size ? own : size - 1;
    }
#pragma unroll
    for (int u = 0; u < 2; u++) mask[u] = k + u * 8 + 1 < size ? 0xffffffffu : k + u * 8 < size ? 0xffffu : 0u;
  }

  // The first pair, or the second.
  __device__ __forceinline__ uint32_t two(const uint16_t* row, int second) const {
    const uint32_t low = __ldg(row + at[second * 2]), high = __ldg(row + at[second * 2 + 1]);
    return (low | high << 16) & mask[second];
  }
};

template <class T>
__device__ __forceinline__ uint16_t bits_of(float x) {
  const auto half = T::rounded(x);
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}

// Columns of a row; left: how many there are.
template <class T, int SIZE>
__device__ __forceinline__ void write(uint16_t* to, int left, bool aligned, const float (&sums)[SIZE]) {
#pragma unroll
  for (int d = 0; d < SIZE; d += kEight) {
    Vector<uint16_t, kEight> eight;
#pragma unroll
    for (int e = 0; e < kEight; e++) eight.value[e] = bits_of<T>(sums[d + e]);
    if (aligned && d < left) *reinterpret_cast<Vector<uint16_t, kEight>*>(to + d) = eight;
    else
      for (int e = 0; e < kEight; e++)
        if (d + e < left) to[d + e] = eight.value[e];
  }
}

// The tensor core's columns are dealt so that a thread ends up with 2 * COLUMNS that stand side by side.
template <class T, int ROWS, int COLUMNS>
__global__ void __launch_bounds__(kThreads, 4) short_halves_kernel(const __grid_constant__ Short s) {
  in_turn();
  constexpr int kOwn = 2 * COLUMNS;
  const int thread = int(threadIdx.x) & 31, group = thread / 4, pair = thread % 4;
  const int first_row = (int(blockIdx.x) * (kThreads / 32) + (int(threadIdx.x) >> 5)) * ROWS * 16 + group;
  const int first_column = int(blockIdx.y) * COLUMNS * 8, column = first_column + group / 2 * kOwn + group % 2, n = first_column + pair * kOwn;
  const uint16_t *rows[2 * ROWS], *columns[COLUMNS];
#pragma unroll
  for (int r = 0; r < 2 * ROWS; r++) rows[r] = static_cast<const uint16_t*>(s.x) + row_or_last(first_row + 8 * r, s.m) * s.x_stride;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) columns[c] = static_cast<const uint16_t*>(s.weight) + row_or_last(column + 2 * c, s.n) * s.weight_stride;
  float sums[ROWS][COLUMNS][4] = {};
  typename T::Bits bias[kOwn] = {};  // widened later: nothing waits here
  if (s.bias)
#pragma unroll
    for (int d = 0; d < kOwn; d++) bias[d] = __ldg(static_cast<const typename T::Bits*>(s.bias) + row_or_last(n + d, s.n));
#pragma unroll 1
  for (int k = 0; k < s.k; k += 16) {
    const Inputs inputs(k + pair * 2, s.k);
    uint32_t a[ROWS][4], b[COLUMNS][2];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int u = 0; u < 2; u++) b[c][u] = inputs.two(columns[c], u);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int u = 0; u < 4; u++) a[r][u] = inputs.two(rows[r * 2 + u % 2], u / 2);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) halves::mma<T::kBFloat>(sums[r][c], a[r], b[c]);
  }
#pragma unroll
  for (int r = 0; r < 2 * ROWS; r++) {
    float own[kOwn];
#pragma unroll
    for (int d = 0; d < kOwn; d++) own[d] = sums[r / 2][d / 2][r % 2 * 2 + d % 2] + T::wide(bias[d]);
    activate(own, s.activation);
    const int m = first_row + r * 8;
    if (m < s.m) write<T>(static_cast<uint16_t*>(s.out) + int64_t(m) * s.n + n, s.n - n, s.n % kEight == 0, own);
  }
}

}  // namespace fxopt::linear
