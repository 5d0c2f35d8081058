// Short dot products of floats, on CUDA cores; and what is left of long ones that were cut in parts.
#pragma once
#include "../../floats.cuh"

namespace fxopt::linear {

enum Activation : int32_t { kNone, kRelu, kSigmoid };

template <int SIZE>
__device__ __forceinline__ void activate(float (&x)[SIZE], int activation) {
  if (activation == kRelu) {
#pragma unroll
    for (int k = 0; k < SIZE; k++) x[k] = x[k] < 0 ? 0.0f : x[k];  // NaN passes
  } else if (activation == kSigmoid) {
#pragma unroll
    for (int k = 0; k < SIZE; k++) x[k] = sigmoid(x[k]);
  }
}

// What is read in place of a row that does not exist, so that no load is under a condition.
__device__ __forceinline__ int64_t row_or_last(int row, int rows) { return row < rows ? row : rows - 1; }

// out[m, n] = activation(sum of partial[part, m, n] + x[m] . weight[n] + bias[n])
struct Short {
  const void *x, *weight, *bias;
  const float* partial;  // [parts, m, n]
  void* out;             // [m, n]
  int64_t x_stride, weight_stride;
  int32_t m, n, k, activation, parts, tall;  // tall: more rows a thread
};

constexpr int kMostIn = 64, kThreads = 128, kMostParts = 8;
constexpr int kEight = 8;  // inputs that neighbouring threads fetch: a sector

// Rows of x and of weight side by side, by input. A thread has ROWS rows, from t / kAcross * ROWS on, and four columns.
template <int ROWS>
struct Tile {
  static constexpr int kColumns = 32, kAcross = kColumns / 4, kRows = kThreads / kAcross * ROWS;
  static constexpr int kStep = kThreads / kEight, kSteps = (kRows + kColumns) / kStep;  // rows and columns that all fetch at once
  static constexpr int kEights = 4, kInputs = kEights * kEight;                         // on their way together
  float memory[kMostIn][kRows + kColumns + 4];  // 4: neighbours on other banks, and still 16 bytes
};

// A thread's part of the inputs from k0 on.
template <class Tile>
struct Fetched {
  float value[Tile::kEights][Tile::kSteps];

  __device__ __forceinline__ Fetched(const Short& s, int first_row, int first_column, int k0) {
    const int line = int(threadIdx.x) / kEight, own = k0 + int(threadIdx.x) % kEight;
    const float* x = static_cast<const float*>(s.x) + (first_row + line) * s.x_stride + own;
    const float* weight = static_cast<const float*>(s.weight) + (first_column + line) * s.weight_stride + own;
#pragma unroll
    for (int e = 0; e < Tile::kEights; e++)
#pragma unroll
      for (int j = 0; j < Tile::kSteps; j++) {
        const int row = j * Tile::kStep, column = row - Tile::kRows;
        const bool inside = column < 0 ? first_row + line + row < s.m : first_column + line + column < s.n;
        const float* from = column < 0 ? x + row * s.x_stride : weight + column * s.weight_stride;
        value[e][j] = inside && own + e * kEight < s.k ? __ldg(from + e * kEight) : 0.0f;
      }
  }

  __device__ __forceinline__ void put(Tile& tile, int k0, int k) const {
    const int line = int(threadIdx.x) / kEight, own = k0 + int(threadIdx.x) % kEight;
#pragma unroll
    for (int e = 0; e < Tile::kEights; e++)
#pragma unroll
      for (int j = 0; j < Tile::kSteps; j++)
        if (k0 + e * kEight < k) tile.memory[own + e * kEight][j * Tile::kStep + line] = value[e][j];
  }
};

// sums += x weight over eight inputs from k0 on.
template <int ROWS>
__device__ __forceinline__ void multiply(const Tile<ROWS>& tile, int k0, int row, int column, float (&sums)[ROWS][4]) {
#pragma unroll
  for (int k = k0; k < k0 + kEight; k++) {
    const auto left = *reinterpret_cast<const Vector<float, ROWS>*>(&tile.memory[k][row]);
    const auto right = *reinterpret_cast<const Vector<float, 4>*>(&tile.memory[k][Tile<ROWS>::kRows + column]);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int d = 0; d < 4; d++) sums[r][d] = fmaf(left.value[r], right.value[d], sums[r][d]);
  }
}

// Four columns of a row; left: how many there are.
__device__ __forceinline__ void write(float* to, int left, bool aligned, const float (&sums)[4]) {
  if (left <= 0) return;
  if (aligned) *reinterpret_cast<float4*>(to) = float4{sums[0], sums[1], sums[2], sums[3]};
  else
    for (int d = 0; d < 4; d++)
      if (d < left) to[d] = sums[d];
}

template <int ROWS, int PARTS>
__global__ void __launch_bounds__(kThreads, 4) short_kernel(const __grid_constant__ Short s) {
  in_turn();
  using Block = Tile<ROWS>;
  __shared__ __align__(16) Block tile;
  const int thread = int(threadIdx.x), first_row = int(blockIdx.x) * Block::kRows, first_column = int(blockIdx.y) * Block::kColumns;
  const int row = thread / Block::kAcross * ROWS, column = thread % Block::kAcross * 4, m = first_row + row, n = first_column + column;
  const Fetched<Block> first(s, first_row, first_column, 0);
  float4 partial[PARTS ? PARTS : 1] = {};  // on their way while the rest is multiplied
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    if (part < s.parts && m < s.m && n < s.n) partial[part] = __ldg(reinterpret_cast<const float4*>(s.partial + (int64_t(part) * s.m + m) * s.n + n));
  float sums[ROWS][4];
#pragma unroll
  for (int d = 0; d < 4; d++) {
    const float bias = s.bias && n + d < s.n ? load<Float>(s.bias, n + d) : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r][d] = bias;
  }
  first.put(tile, 0, s.k);
  for (int k = Block::kInputs; k < s.k; k += Block::kInputs) Fetched<Block>(s, first_row, first_column, k).put(tile, k, s.k);
  __syncthreads();
  for (int k = 0; k < s.k; k += kEight) multiply(tile, k, row, column, sums);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    sums[0][0] += partial[part].x;
    sums[0][1] += partial[part].y;
    sums[0][2] += partial[part].z;
    sums[0][3] += partial[part].w;
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    activate(sums[r], s.activation);
    if (m + r < s.m) write(static_cast<float*>(s.out) + int64_t(m + r) * s.n + n, s.n - n, s.n % 4 == 0, sums[r]);
  }
}

}  // namespace fxopt::linear
