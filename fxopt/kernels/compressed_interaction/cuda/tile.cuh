// What a launch is told, and how a block's operands come: weights into shared memory by chunks, y whole, x into registers.
#pragma once
#include "../../columns/cuda/async.cuh"
#include "../../floats.cuh"
#include "../../grid.cuh"

namespace fxopt::compress {

constexpr int kRows = 128, kHalf = 128;      // of a block: rows (b, d), and threads that take one half of its chunks
constexpr int kPiece = 28;                   // numbers m of a chunk, at most: xDeepFM has 26 fields
constexpr int kBehind = 3;                   // m's behind the last that a step may read, for nothing
constexpr int kRowPitch = kRows + 4;         // floats of a number m of y: two m's in one read are on different banks

// Floats of one h of a chunk: the other's are on other banks. An output's are kPiece, 4 more than a multiple of 8: eight
// outputs and two h's are on different banks. And of all buffers: two of two h's for each half of a block.
__host__ __device__ constexpr int plane_of(int columns) { return kPiece * columns + 16; }
__host__ __device__ constexpr int buffers_of(int columns) { return 8 * plane_of(columns); }

// A chunk is two h's and `piece` m's, numbered with the m's of two h's side by side. Strides in elements.
struct Compress {
  const float *x, *y, *weight, *bias;  // weight: [outputs, h * m], an output's side by side; bias: null for none
  float *out, *partial;                // [B, outputs, positions], and where there are more splits than one, these of each
  int32_t x_strides[3], y_strides[3], weight_stride;
  int32_t rows, positions, h, m, outputs;
  int32_t splits, chunks, piece, pieces, unit;  // pieces: chunks of two h's; unit: weights that one copy takes
  int32_t narrow, exact, relu;                  // narrow: 64 outputs a block instead of 128
};
static_assert(sizeof(Compress) == 6 * 8 + 20 * 4);

__device__ __forceinline__ float activated(const Compress& c, float sum) { return c.relu && sum < 0.0f ? 0.0f : sum; }

struct Chunk {
  int h, first, live;  // its first h; its first m and how many there are

  __device__ __forceinline__ Chunk(const Compress& c, int number) {
    h = number / c.pieces * 2;
    first = (number - h / 2 * c.pieces) * c.piece;
    count(c);
  }
  __device__ __forceinline__ void count(const Compress& c) { live = c.m - first < c.piece ? c.m - first : c.piece; }
  __device__ __forceinline__ void advance(const Compress& c) {
    first += c.piece;
    if (first >= c.m) first = 0, h += 2;
    count(c);
  }
  __device__ __forceinline__ int padded() const { return (live + 3) / 4 * 4; }
};

// Where a row is in a tensor [B, ., D]. A row behind the last is the first one: nobody reads what becomes of it.
__device__ __forceinline__ int place_of(const Compress& c, int row, int of_batch, int of_position) {
  if (row >= c.rows) row = 0;
  const int batch = row / c.positions;
  return batch * of_batch + (row - batch * c.positions) * of_position;
}

// What a thread copies of a chunk: UNIT weights side by side of every kStep-th output.
template <int UNIT>
struct Copied {
  static constexpr int kAcross = 32 / UNIT, kStep = kHalf / kAcross / 2;
  int m, h, output;  // of the chunk; the h of two; the first output

  __device__ __forceinline__ explicit Copied(int thread) : m(thread % kAcross * UNIT), h(thread / kAcross % 2), output(thread / kAcross / 2) {}
  __device__ __forceinline__ int place(int columns) const { return h * plane_of(columns) + output * kPiece + m; }
};

// Starts the copies of a chunk's weights for outputs from `begin` on: zeros where there are none.
template <int UNIT, int COLUMNS>
__device__ __forceinline__ void copy_weights(const Compress& c, const Chunk& chunk, int begin, int thread, float* to) {
  const Copied<UNIT> own(thread);
  if (own.m >= chunk.padded()) return;
  const bool real = chunk.h + own.h < c.h && own.m < chunk.live;
  const int first = begin + own.output, outputs = real ? c.outputs - first : 0;
  const float* from = c.weight + (real ? first * c.weight_stride + (chunk.h + own.h) * c.m + chunk.first + own.m : 0);
  to += own.place(COLUMNS);
#pragma unroll
  for (int k = 0; k < COLUMNS; k += own.kStep) {
    const float* at = from + int64_t(k) * c.weight_stride;
    if constexpr (UNIT == 4) cuda::copy_async(to + k * kPiece, at, k < outputs);
    else cuda::copy_async_few<UNIT * 4>(to + k * kPiece, at, k < outputs);
  }
}

template <int COLUMNS>
__device__ __forceinline__ void copy_weights(const Compress& c, const Chunk& chunk, int begin, int thread, float* to) {
  if (c.unit == 4) copy_weights<4, COLUMNS>(c, chunk, begin, thread, to);
  else if (c.unit == 2) copy_weights<2, COLUMNS>(c, chunk, begin, thread, to);
  else copy_weights<1, COLUMNS>(c, chunk, begin, thread, to);
}

// y of the block's rows, and where these are in x.
__device__ __forceinline__ void read_y(const Compress& c, int first_row, float* to, int* places) {
  constexpr int kAtOnce = 16, kStep = 2 * kHalf / kRows;
  const int row = int(threadIdx.x) % kRows, place = place_of(c, first_row + row, c.y_strides[0], c.y_strides[2]);
  if (int(threadIdx.x) < kRows) places[row] = place_of(c, first_row + row, c.x_strides[0], c.x_strides[2]);
  for (int first = int(threadIdx.x) / kRows; first < c.m; first += kAtOnce * kStep) {
    float values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; k++) {
      const int m = first + k * kStep;
      values[k] = __ldg(c.y + place + (m < c.m ? m : first) * c.y_strides[1]);  // loads that ask first would wait for each other
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; k++)
      if (first + k * kStep < c.m) to[(first + k * kStep) * kRowPitch + row] = values[k];
  }
}

// Four rows of x at one h; the last h for one behind it.
__device__ __forceinline__ void read_x(const Compress& c, const int* places, int h, float (&x)[4]) {
  const float* from = c.x + (h < c.h ? h : c.h - 1) * c.x_strides[1];
#pragma unroll
  for (int r = 0; r < 4; r++) x[r] = __ldg(from + places[r]);
}

}  // namespace fxopt::compress
