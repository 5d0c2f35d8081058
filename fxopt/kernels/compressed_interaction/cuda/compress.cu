// einsum("bhd,bmd,ohm->bod") on tensor cores: the products x_h y_m are made in registers, as the matrix A of rows (b, d) and
// pairs (h, m), and are never stored. A step of 8 pairs is two h's by four m's: a thread keeps x of one h over all m's.
// The two halves of a block take chunks of their own, and so do splits of the grid. Their sums are added in a fixed order.
#include "../../gemm/tf32.cuh"
#include "tile.cuh"

namespace fxopt::compress {

// Which part of a block's tile a thread computes: a warp 32 rows and all outputs, so that no product is made twice. Four
// neighbouring rows are a thread's: a permutation of the matrix's, so that it reads and writes them at once.
struct Own {
  int half, thread, row, column, quarter;  // column: an output of eight

  __device__ __forceinline__ Own() {
    half = int(threadIdx.x) / kHalf, thread = int(threadIdx.x) % kHalf;
    quarter = thread % 4, column = thread % 32 / 4, row = thread / 4 * 4;
  }
  __device__ __forceinline__ int h() const { return quarter / 2; }      // of the two
  __device__ __forceinline__ int m() const { return quarter % 2 * 2; }  // and the next, of four
};

// Rounds a thread's own weights in place, once for the four warps that read them.
template <int UNIT, int COLUMNS>
__device__ __forceinline__ void round_weights(const Chunk& chunk, int thread, float* weights) {
  const Copied<UNIT> own(thread);
  if (own.m >= chunk.padded()) return;
  weights += own.place(COLUMNS);
#pragma unroll
  for (int k = 0; k < COLUMNS; k += own.kStep) {
    auto& some = *reinterpret_cast<Vector<float, UNIT>*>(weights + k * kPiece);
    Vector<float, UNIT> w = some;
#pragma unroll
    for (int u = 0; u < UNIT; u++) w.value[u] = tf32::rounded(w.value[u]);
    some = w;
  }
}

template <int COLUMNS>
__device__ __forceinline__ void round_weights(const Compress& c, const Chunk& chunk, int thread, float* weights) {
  if (c.unit == 4) round_weights<4, COLUMNS>(chunk, thread, weights);
  else if (c.unit == 2) round_weights<2, COLUMNS>(chunk, thread, weights);
  else round_weights<1, COLUMNS>(chunk, thread, weights);
}

// Adds 8 pairs. y, weights: of the thread's first m. MASKED: of its two m's only `live` are there.
template <bool EXACT, int TILES, bool MASKED>
__device__ __forceinline__ void add_pairs(const float (&x)[4], const float* y, const float* weights, int live, float (&sums)[2][TILES][4]) {
  const float4 one = *reinterpret_cast<const float4*>(y), two = *reinterpret_cast<const float4*>(y + kRowPitch);
  const float ys[2][4] = {{one.x, one.y, one.z, one.w}, {two.x, two.y, two.z, two.w}};
  tf32::Fragment<4, EXACT> a[2];
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int r = k / 4 * 2 + k % 2, m = k % 4 / 2;
    a[k / 4].set(k % 4, !MASKED || m < live ? x[r] * ys[m][r] : 0.0f);
  }
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    const float2 w = *reinterpret_cast<const float2*>(weights + j * 8 * kPiece);
    tf32::Fragment<2, EXACT> b;
    if constexpr (EXACT) b.set(0, w.x), b.set(1, w.y);
    else b.big[0] = w.x, b.big[1] = w.y;
    tf32::multiply<EXACT>(sums[0][j], a[0], b);
    tf32::multiply<EXACT>(sums[1][j], a[1], b);
  }
}

template <bool EXACT, int TILES>
__device__ __forceinline__ void add_chunk(const Compress& c, const Chunk& chunk, const Own& own, const float (&x)[4], const float* y, const float* weights,
                                          float (&sums)[2][TILES][4]) {
  const bool both = chunk.h + 1 < c.h;
  const int live = chunk.h + own.h() < c.h ? chunk.live - own.m() : 0, whole = both ? chunk.live / 4 * 4 : 0;
  y += (chunk.first + own.m()) * kRowPitch + own.row;
  weights += own.h() * plane_of(TILES * 8) + own.column * kPiece + own.m();
#pragma unroll(EXACT ? 2 : 4)  // 4: TF32 3-6% faster, exact products 1% slower
  for (int m = 0; m < whole; m += 4) add_pairs<EXACT, TILES, false>(x, y + m * kRowPitch, weights + m, 2, sums);
  for (int m = whole; m < chunk.live; m += 4) add_pairs<EXACT, TILES, true>(x, y + m * kRowPitch, weights + m, live - m, sums);
}

// What sums begin with. (Added to them in the end, each bias would wait for the stores before it: 20 us of 108.)
template <int TILES>
__device__ __forceinline__ void start_sums(const Compress& c, const Own& own, int begin, bool biased, float (&sums)[2][TILES][4]) {
#pragma unroll
  for (int k = 0; k < TILES * 2; k++) {
    const int j = k / 2, side = k % 2, output = begin + j * 8 + own.quarter * 2 + side;
    const float bias = biased && output < c.outputs ? __ldg(c.bias + output) : 0.0f;
    sums[0][j][side] = sums[0][j][2 + side] = sums[1][j][side] = sums[1][j][2 + side] = bias;
  }
}

// The sums of one half's chunks [number, end), whose weights come into two buffers in turn; those of the first are on their way.
template <bool EXACT, int TILES>
__device__ __forceinline__ void add_chunks(const Compress& c, const Own& own, const int* places, int begin, int number, int end, const float* y, float* weights,
                                           float (&sums)[2][TILES][4]) {
  constexpr int kColumns = TILES * 8, kBuffer = 2 * plane_of(kColumns);
  Chunk chunk(c, number);
  float next_x[4];
  read_x(c, places + own.row, chunk.h + own.h(), next_x);
  for (int turn = 0; number < end; number++, turn ^= 1, chunk.advance(c)) {
    const float x[4] = {next_x[0], next_x[1], next_x[2], next_x[3]};
    cuda::wait_copies<0>();
    if constexpr (!EXACT) round_weights<kColumns>(c, chunk, own.thread, weights + turn * kBuffer);
    __barrier_sync_count(unsigned(1 + own.half), unsigned(kHalf));  // the chunk is there, and nobody reads the last one
    if (number + 1 < end) {
      Chunk next = chunk;
      next.advance(c);
      copy_weights<kColumns>(c, next, begin, own.thread, weights + (turn ^ 1) * kBuffer);
      cuda::commit_copies();
      read_x(c, places + own.row, next.h + own.h(), next_x);
    }
    add_chunk<EXACT, TILES>(c, chunk, own, x, y, weights + turn * kBuffer, sums);
  }
}

// Adds the second half's sums to the first's, through the weights' memory.
template <int TILES>
__device__ __forceinline__ void join_halves(const Own& own, float* memory, float (&sums)[2][TILES][4]) {
  float4* const given = reinterpret_cast<float4*>(memory) + own.thread;
  __syncthreads();  // nobody reads weights any more
#pragma unroll
  for (int t = 0; t < 2 * TILES; t++) {
    const float* s = sums[t % 2][t / 2];
    if (own.half == 1) given[t * kHalf] = float4{s[0], s[1], s[2], s[3]};
  }
  __syncthreads(), __syncthreads();  // the sums are there. Behind one alone racecheck (2025.3) sees hazards that are none
#pragma unroll
  for (int t = 0; t < 2 * TILES; t++) {
    if (own.half == 1) continue;
    const float4 other = given[t * kHalf];
    float* s = sums[t % 2][t / 2];
    s[0] += other.x, s[1] += other.y, s[2] += other.z, s[3] += other.w;
  }
}

template <int TILES>
__device__ __forceinline__ void write(const Compress& c, const Own& own, int first_row, int begin, float* out, const float (&sums)[2][TILES][4]) {
  const int row = first_row + own.row;
  int places[4];
#pragma unroll
  for (int r = 0; r < 4; r++) places[r] = place_of(c, row + r, c.outputs * c.positions, 1);
#pragma unroll
  for (int k = 0; k < TILES * 2; k++) {
    const int j = k / 2, side = k % 2, output = begin + j * 8 + own.quarter * 2 + side;
    if (output >= c.outputs) continue;
    float values[4] = {sums[0][j][side], sums[0][j][2 + side], sums[1][j][side], sums[1][j][2 + side]};
    if (c.splits == 1) {
#pragma unroll
      for (int r = 0; r < 4; r++) values[r] = activated(c, values[r]);
    }
    float* const to = out + output * c.positions;
    if (c.positions % 4 == 0) {
      if (row < c.rows) *reinterpret_cast<float4*>(to + places[0]) = float4{values[0], values[1], values[2], values[3]};
      continue;
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
      if (row + r < c.rows) to[places[r]] = values[r];
  }
}

template <bool EXACT, int TILES>
__global__ void __launch_bounds__(2 * kHalf, 1) compress_kernel(const __grid_constant__ Compress c) {
  in_turn();
  __shared__ __align__(16) int places[kRows];
  float* const memory = reinterpret_cast<float*>(dynamic_shared());
  const Own own;
  const int split = int(blockIdx.y) % c.splits, begin = int(blockIdx.y) / c.splits * TILES * 8, first_row = int(blockIdx.x) * kRows;
  const int part = split * 2 + own.half, parts = c.splits * 2;
  const int number = int(int64_t(c.chunks) * part / parts), end = int(int64_t(c.chunks) * (part + 1) / parts);
  float* const y = memory + buffers_of(TILES * 8);
  float* const weights = memory + own.half * buffers_of(TILES * 8) / 2;
  if (number < end) copy_weights<TILES * 8>(c, Chunk(c, number), begin, own.thread, weights);
  cuda::commit_copies();
  read_y(c, first_row, y, places);
  __syncthreads();
  float sums[2][TILES][4];
  start_sums<TILES>(c, own, begin, c.bias && part == 0, sums);
  add_chunks<EXACT, TILES>(c, own, places, begin, number, end, y, weights, sums);
  join_halves<TILES>(own, memory, sums);
  float* const out = c.splits == 1 ? c.out : c.partial + int64_t(split) * c.rows * c.outputs;
  if (own.half == 0) write<TILES>(c, own, first_row, begin, out, sums);
}

constexpr int kSumThreads = 256;

// The splits one after another: SIZE numbers a thread.
template <int SIZE>
__global__ void __launch_bounds__(kSumThreads) splits_kernel(const __grid_constant__ Compress c) {
  in_turn();
  const int64_t size = int64_t(c.rows) * c.outputs, at = (int64_t(blockIdx.x) * kSumThreads + int(threadIdx.x)) * SIZE;
  if (at >= size) return;
  Vector<float, SIZE> sum = *reinterpret_cast<const Vector<float, SIZE>*>(c.partial + at);
#pragma unroll 4
  for (int split = 1; split < c.splits; split++) {
    const Vector<float, SIZE> more = *reinterpret_cast<const Vector<float, SIZE>*>(c.partial + split * size + at);
#pragma unroll
    for (int k = 0; k < SIZE; k++) sum.value[k] += more.value[k];
  }
#pragma unroll
  for (int k = 0; k < SIZE; k++) sum.value[k] = activated(c, sum.value[k]);
  *reinterpret_cast<Vector<float, SIZE>*>(c.out + at) = sum;
}

template <int SIZE>
static const char* add_splits(const Compress& c, void* stream) {
  const int64_t threads = int64_t(c.rows) * c.outputs / SIZE;
  return launch(splits_kernel<SIZE>, dim3(unsigned((threads + kSumThreads - 1) / kSumThreads)), kSumThreads, stream, c);
}

template <int TILES>
static const char* multiply(const Compress& c, void* stream) {
  constexpr int kColumns = TILES * 8;
  const dim3 blocks(unsigned((c.rows + kRows - 1) / kRows), unsigned((c.outputs + kColumns - 1) / kColumns * c.splits));
  const int shared = 4 * (buffers_of(kColumns) + (c.m + kBehind) * kRowPitch);
  return launch(c.exact ? compress_kernel<true, TILES> : compress_kernel<false, TILES>, blocks, 2 * kHalf, stream, c, shared);
}

}  // namespace fxopt::compress

// Of floats. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_compress(const fxopt::compress::Compress* c, int, void* stream) {
  using namespace fxopt::compress;
  const char* text = c->narrow ? multiply<8>(*c, stream) : multiply<16>(*c, stream);
  if (text || c->splits == 1) return text;
  return c->rows * int64_t(c->outputs) % 4 == 0 ? add_splits<4>(*c, stream) : add_splits<1>(*c, stream);
}
