// out[b, l] = x[b, of_x[l]] @ weight[of_weight[l]] (* y[b, of_y[l]]): many small products, each with a matrix of its own. A
// block has the matrices of a few lanes in shared memory, for all its rows; a thread computes four outputs of two rows of one
// lane, and has 16 inputs of both on their way at once: what limits is latency.
#include "../../floats.cuh"
#include "../../grid.cuh"

#include <algorithm>
#include <cmath>

namespace fxopt::grouped {

constexpr int kThreads = 256, kOutputs = 4, kRows = 2, kLanes = 8;
constexpr int kInputs = 4;       // of a row that a thread reads at once, in fours
constexpr int kBusy = 2;         // blocks of a multiprocessor
constexpr int kRoom = 12000;     // floats of dynamic shared memory: what every kernel may have

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

// From a lane's matrix in shared memory to the next: threads of neighbouring lanes read other banks.
__host__ __device__ constexpr int pitch_of(int K, int groups) { return ((K + 3) / 4 * 4 + 1) * groups * kOutputs; }

// The matrices of lanes [first, first + live) as [lane, K, N], zeros behind the last of both.
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
    to[lane * pitch_of(g.K, groups) + k * N + n] = real ? weight : 0.0f;
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

__device__ __forceinline__ const float* vector_of(const Operand& t, int row, int at) {
  return static_cast<const float*>(t.data) + row * t.strides[0] + (at < 0 ? 0 : at) * t.strides[1];
}

// Inputs of a thread's rows. CLOSE: rows of x, y and out are read and written 16 bytes at a time.
template <bool CLOSE>
struct Inputs {
  float4 value[kRows][kInputs];

  // From input k on; instead of rows that are not there, the first one.
  __device__ __forceinline__ void read(const Grouped& g, int begin, int slots, int vector, int k) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = begin + r * slots;
      const float* from = vector_of(g.x, row < g.rows ? row : 0, vector);
#pragma unroll
      for (int c = 0; c < kInputs; c++)
        if (k + c * 4 < g.K) value[r][c] = four<CLOSE>(from, g.x.strides[2], k + c * 4, g.K);
    }
  }

  // w: a matrix in shared memory, from input k and the thread's output on.
  __device__ __forceinline__ void multiply(const float* w, int groups, int left, float4 (&sums)[kRows]) const {
#pragma unroll
    for (int c = 0; c < kInputs; c++) {
      if (c * 4 >= left) break;
      const auto* of_k = reinterpret_cast<const float4*>(w) + c * 4 * groups;
      const float4 w0 = of_k[0], w1 = of_k[groups], w2 = of_k[2 * groups], w3 = of_k[3 * groups];
#pragma unroll
      for (int r = 0; r < kRows; r++)
        add(sums[r], value[r][c].x, w0), add(sums[r], value[r][c].y, w1), add(sums[r], value[r][c].z, w2), add(sums[r], value[r][c].w, w3);
    }
  }
};

template <bool CLOSE>
__global__ void __launch_bounds__(kThreads, kBusy) grouped_kernel(const __grid_constant__ Grouped g) {
  wait_for_stream();
  let_next_start();
  auto* matrices = reinterpret_cast<float*>(dynamic_shared());
  const int groups = (g.N + kOutputs - 1) / kOutputs, tiles = (g.lanes + g.block_lanes - 1) / g.block_lanes;
  const int first = int(blockIdx.x) % tiles * g.block_lanes, left = g.lanes - first, live = left < g.block_lanes ? left : g.block_lanes;
  const int slots = kThreads / (groups * g.block_lanes), n = int(threadIdx.x) % groups * kOutputs;
  const int own = int(threadIdx.x) / groups, lane = own % g.block_lanes, slot = own / g.block_lanes;
  const int taken = first + (lane < live ? lane : 0);  // by threads that have no lane, too
  const int vector = entry(g.of_x, taken, g.counts[0]), matrix = entry(g.of_weight, taken, g.counts[1]);
  const int factor = g.y.data ? entry(g.of_y, taken, g.counts[2]) : 0;
  const bool known = vector >= 0 && matrix >= 0 && factor >= 0;
  int begin = int(blockIdx.x) / tiles * slots * kRows + slot;
  Inputs<CLOSE> inputs;
  inputs.read(g, begin, slots, vector, 0);
  fill(g, first, live, groups, matrices);
  __syncthreads();
  if (lane >= live || slot >= slots) return;
  const float* w = matrices + lane * pitch_of(g.K, groups) + n;
  const int step = int(gridDim.x) / tiles * slots * kRows;
  for (; begin < g.rows; begin += step) {
    float4 sums[kRows] = {};
    for (int k = 0;;) {
      inputs.multiply(w + k * groups * kOutputs, groups, g.K - k, sums);
      k += kInputs * 4;
      if (k >= g.K) break;
      inputs.read(g, begin, slots, vector, k);
    }
    if (begin + step < g.rows) inputs.read(g, begin + step, slots, vector, 0);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = begin + r * slots;
      if (row >= g.rows) break;
      float4 sum = sums[r];
      if (g.y.data) {
        const float4 y = four<CLOSE>(vector_of(g.y, row, factor), g.y.strides[2], n, g.N);
        sum = float4{sum.x * y.x, sum.y * y.y, sum.z * y.z, sum.w * y.w};
      }
      if (!known) sum = float4{NAN, NAN, NAN, NAN};
      write<CLOSE>(static_cast<float*>(const_cast<void*>(g.out.data)) + (int64_t(row) * g.lanes + first + lane) * g.N, n, g.N, sum);
    }
  }
}

static bool is_close(const Operand& t) {
  return reinterpret_cast<uint64_t>(t.data) % 16 == 0 && t.strides[2] == 1 && t.strides[0] % 4 == 0 && t.strides[1] % 4 == 0;
}

}  // namespace fxopt::grouped

// nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_grouped(const fxopt::grouped::Grouped* given, int, void* stream) {
  using namespace fxopt::grouped;
  Grouped g = *given;
  const int groups = (g.N + kOutputs - 1) / kOutputs, pitch = pitch_of(g.K, groups);
  g.block_lanes = std::min({kLanes, int(g.lanes), kRoom / pitch});
  const bool close = is_close(g.x) && (!g.y.data || is_close(g.y)) && is_close(g.out) && g.K % 4 == 0 && g.N % 4 == 0;
  int count = 0;
  if (const char* text = fxopt::multiprocessors(&count)) return text;
  const int tiles = (g.lanes + g.block_lanes - 1) / g.block_lanes;
  const int64_t rows = kThreads / (groups * g.block_lanes) * kRows, parts = (g.rows + rows - 1) / rows;
  const int64_t blocks = tiles * std::min(parts, int64_t(kBusy * count + tiles - 1) / tiles);
  const int bytes = g.block_lanes * pitch * int(sizeof(float));
  return fxopt::launch_shared(close ? grouped_kernel<true> : grouped_kernel<false>, dim3(unsigned(blocks)), kThreads, bytes, stream, g);
}
