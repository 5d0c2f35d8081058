// out[b, l] = x[b, of_x[l]] @ weight[of_weight[l]] (* y[b, of_y[l]]): many small products, each with a matrix of its own. A
// block has the matrices of a few lanes in shared memory; a thread computes four outputs of four rows of one lane.
#include "../../floats.cuh"
#include "../../grid.cuh"

#include <algorithm>
#include <cmath>

namespace fxopt::grouped {

constexpr int kThreads = 256, kOutputs = 4, kRows = 4, kLanes = 8;
constexpr int kRoom = 12000;  // floats of dynamic shared memory: what every kernel may have

struct Grouped {
  Operand x, weight, y, out;  // [rows, vectors, K], [matrices, K, N], [rows, vectors, N] or null, [rows, lanes, N]
  const int64_t *of_x, *of_weight, *of_y;  // what each lane takes; null: lane l takes entry l
  int32_t counts[3];                       // how many entries x, weight and y have
  int32_t rows, lanes, K, N;
  int32_t block_lanes;                     // set here
};
static_assert(sizeof(Grouped) == 4 * 32 + 3 * 8 + 32);

// What `lane` takes; -1: there is no such entry.
__device__ __forceinline__ int entry(const int64_t* of, int lane, int count) {
  const int64_t at = of ? __ldg(reinterpret_cast<const long long*>(of) + lane) : lane;
  return uint64_t(at) < uint64_t(count) ? int(at) : -1;
}

// Floats in shared memory from an input of a matrix to the next, and from a lane's matrix to the next: threads that write
// neighbouring inputs, and those that read neighbouring lanes, use other banks.
__host__ __device__ constexpr int step_of(int groups) { return (groups + 1) * kOutputs; }
__host__ __device__ constexpr int pitch_of(int K, int groups) {
  const int size = (K + 3) / 4 * 4 * step_of(groups);
  return size + (groups * kOutputs + 32 - size % 32) % 32;
}

// The matrices of lanes [first, first + live), zeros behind the last input and output.
__device__ __forceinline__ void fill(const Grouped& g, int first, int live, int groups, float* to) {
  const int K = (g.K + 3) / 4 * 4, N = groups * kOutputs, threads = kThreads / g.block_lanes;
  const int lane = int(threadIdx.x) / threads;
  if (lane >= live) return;
  const int matrix = entry(g.of_weight, first + lane, g.counts[1]);
  const bool turned = g.weight.strides[1] < g.weight.strides[2];  // neighbouring threads read neighbouring floats
#pragma unroll 4
  for (int at = int(threadIdx.x) % threads; at < K * N; at += threads) {
    const int k = turned ? at % K : at / N, n = turned ? at / K : at % N;
    const bool real = k < g.K && n < g.N && matrix >= 0;
    const int64_t from = real ? matrix * g.weight.strides[0] + k * g.weight.strides[1] + n * g.weight.strides[2] : 0;
    const float weight = load<Float>(g.weight.data, from);  // loads that ask first would wait for each other
    to[lane * pitch_of(g.K, groups) + k * step_of(groups) + n] = real ? weight : 0.0f;
  }
}

// Four floats from `at` on, zeros behind the last of `count`.
template <bool CLOSE>
__device__ __forceinline__ float4 four(const float* from, int64_t stride, int at, int count) {
  if constexpr (CLOSE) {
    return __ldg(reinterpret_cast<const float4*>(from + at));
  } else {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = at + k < count ? __ldg(from + (at + k) * stride) : 0.0f;
    return float4{v[0], v[1], v[2], v[3]};
  }
}

template <bool CLOSE>
__device__ __forceinline__ void write(float* out, int n, int N, const float4& v) {
  if constexpr (CLOSE) {
    *reinterpret_cast<float4*>(out + n) = v;
  } else {
    const float values[kOutputs] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < kOutputs; k++)
      if (n + k < N) out[n + k] = values[k];
  }
}

__device__ __forceinline__ void add(float4& sum, float x, const float4& w) {
  sum.x = fmaf(x, w.x, sum.x), sum.y = fmaf(x, w.y, sum.y), sum.z = fmaf(x, w.z, sum.z), sum.w = fmaf(x, w.w, sum.w);
}

__device__ __forceinline__ const float* vector_of(const Operand& t, int64_t row, int at) {
  return static_cast<const float*>(t.data) + row * t.strides[0] + (at < 0 ? 0 : at) * t.strides[1];
}

// CLOSE: rows of x, y and out are read and written 16 bytes at a time.
template <bool CLOSE>
__global__ void __launch_bounds__(kThreads, CLOSE ? 3 : 2) grouped_kernel(const __grid_constant__ Grouped g) {
  in_turn();
  auto* matrices = reinterpret_cast<float*>(dynamic_shared());
  const int groups = (g.N + kOutputs - 1) / kOutputs, tiles = (g.lanes + g.block_lanes - 1) / g.block_lanes;
  const int first = int(blockIdx.x) % tiles * g.block_lanes, left = g.lanes - first, live = left < g.block_lanes ? left : g.block_lanes;
  const int slots = kThreads / (groups * g.block_lanes), n = int(threadIdx.x) % groups * kOutputs;
  const int own = int(threadIdx.x) / groups, lane = own % g.block_lanes, slot = own / g.block_lanes;
  const int taken = first + (lane < live ? lane : 0);  // by threads that have no lane, too
  const int vector = entry(g.of_x, taken, g.counts[0]), matrix = entry(g.of_weight, taken, g.counts[1]);
  const int factor = g.y.data ? entry(g.of_y, taken, g.counts[2]) : 0;
  fill(g, first, live, groups, matrices);
  __syncthreads();
  if (lane >= live || slot >= slots) return;
  const int64_t begin = int64_t(int(blockIdx.x) / tiles) * slots * kRows + slot;
  const float *x[kRows], *w = matrices + lane * pitch_of(g.K, groups) + n;
  float4 sums[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; r++) {  // instead of rows that are not there, the first one
    const int64_t row = begin + r * slots;
    x[r] = vector_of(g.x, row < g.rows ? row : 0, vector);
  }
#pragma unroll 1
  for (int k = 0; k < g.K; k += 4) {
    float4 values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) values[r] = four<CLOSE>(x[r], g.x.strides[2], k, g.K);
    const auto* of_k = reinterpret_cast<const float4*>(w + k * step_of(groups));
    const float4 w0 = of_k[0], w1 = of_k[groups + 1], w2 = of_k[2 * (groups + 1)], w3 = of_k[3 * (groups + 1)];
#pragma unroll
    for (int r = 0; r < kRows; r++)
      add(sums[r], values[r].x, w0), add(sums[r], values[r].y, w1), add(sums[r], values[r].z, w2), add(sums[r], values[r].w, w3);
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int64_t row = begin + r * slots;
    if (row >= g.rows) return;
    float4 sum = sums[r];
    if (g.y.data) {
      const float4 y = four<CLOSE>(vector_of(g.y, row, factor), g.y.strides[2], n, g.N);
      sum = float4{sum.x * y.x, sum.y * y.y, sum.z * y.z, sum.w * y.w};
    }
    if (vector < 0 || matrix < 0 || factor < 0) sum = float4{NAN, NAN, NAN, NAN};
    write<CLOSE>(static_cast<float*>(const_cast<void*>(g.out.data)) + (row * g.lanes + first + lane) * g.N, n, g.N, sum);
  }
}

static bool is_close(const Operand& t) {
  return reinterpret_cast<uint64_t>(t.data) % 16 == 0 && t.strides[2] == 1 && t.strides[0] % 4 == 0 && t.strides[1] % 4 == 0;
}

}  // namespace fxopt::grouped

// nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_grouped(const fxopt::grouped::Grouped* given, int, void* stream) {
  using namespace fxopt::grouped;
  Grouped g = *given;
  const int groups = (g.N + kOutputs - 1) / kOutputs, pitch = pitch_of(g.K, groups);
  g.block_lanes = std::min({kLanes, int(g.lanes), kRoom / pitch});
  const bool close = is_close(g.x) && (!g.y.data || is_close(g.y)) && is_close(g.out) && g.K % 4 == 0 && g.N % 4 == 0;
  const int64_t rows = kThreads / (groups * g.block_lanes) * kRows;
  const int64_t blocks = (g.lanes + g.block_lanes - 1) / g.block_lanes * ((g.rows + rows - 1) / rows);
  const int bytes = g.block_lanes * pitch * int(sizeof(float));
  return fxopt::launch(close ? grouped_kernel<true> : grouped_kernel<false>, dim3(unsigned(blocks)), kThreads, stream, g, bytes);
}
