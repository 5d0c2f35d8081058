// Linear layers one behind the other for a few rows, in one launch: memory is read from its first to its last
// microsecond, because weights depend on no layer before theirs.
#include "../../columns/cuda/async.cuh"
#include "../../floats.cuh"
#include "../../grid.cuh"

namespace fxopt::few_rows {

constexpr int kThreads = 256, kWarps = kThreads / 32, kOutputs = 8, kMostRows = 16, kMostLayers = 16;
#if !defined(__CUDA_ARCH_LIST__)
constexpr int kStages = 2;
#else  // what a block may have: 227 KB from sm_90 to sm_110, 163 KB on sm_80, else at least 99 KB
constexpr int kArch = __CUDA_ARCH_LIST__, kStages = kArch >= 900 && kArch < 1200 ? 6 : kArch == 800 ? 4 : 2;
#endif
constexpr int kRing = kStages * kOutputs * kThreads, kShared = kRing * 16 + kWarps * kOutputs * kMostRows * 4;

enum Activation : int32_t { kNone, kRelu, kSigmoid };

__device__ __forceinline__ float activated(float x, int activation) {
  if (activation == kRelu) return x < 0 ? 0.0f : x;  // NaN passes
  return activation == kSigmoid ? sigmoid(x) : x;
}

struct Layer {
  const float *weight, *bias;  // [n, k], [n] or null
  int32_t n, k, activation, outputs;  // of a block at a time: dealt to all blocks, neighbours to one
};

struct Request {
  const float* x;  // [rows, k of the first]
  float* out;      // [rows, n of the last]
  float* between;  // [2, rows, widest]
  int32_t rows, layers, widest, unused;
  Layer layer[kMostLayers];
};

// The weights that this thread multiplies, on their way to its own part of shared memory, as many stages ahead as fit
// there and across layers. A stage: four inputs, of a group's outputs.
struct Weights {
  const Request& request;
  float4* mine;
  int layer = 0, group, at = 0, to = 0, from = 0;

  __device__ explicit Weights(const Request& request) : request(request), mine(dynamic_shared() + threadIdx.x), group(int(blockIdx.x)) {
    for (int stage = 0; stage < kStages; stage++) fetch();
  }

  __device__ __forceinline__ void fetch() {
    while (layer < request.layers && group * request.layer[layer].outputs >= request.layer[layer].n) next_layer();
    if (layer < request.layers) {
      const Layer& l = request.layer[layer];
      const int first = group * l.outputs, k = (at * kThreads + int(threadIdx.x)) * 4;
      const float* from = l.weight + int64_t(first) * l.k + k;
#pragma unroll
      for (int o = 0; o < kOutputs; o++)
        if (k < l.k && o < l.outputs && first + o < l.n) cuda::copy_async(mine + (to * kOutputs + o) * kThreads, from + int64_t(o) * l.k, true);
      if (++at * kThreads * 4 >= l.k) {
        at = 0;
        group += int(gridDim.x);
      }
    }
    cuda::commit_copies();
    to = to + 1 == kStages ? 0 : to + 1;
  }

  __device__ __forceinline__ void next_layer() {
    layer++;
    group = int(blockIdx.x);
    at = 0;
  }

  // The oldest stage, of output o; then it is given up.
  __device__ __forceinline__ void wait() const { cuda::wait_copies<kStages - 1>(); }
  __device__ __forceinline__ float4 operator[](int o) const { return mine[(from * kOutputs + o) * kThreads]; }
  __device__ __forceinline__ void give_up() {
    from = from + 1 == kStages ? 0 : from + 1;
    fetch();
  }
};

// Past L1, where another block's results of two layers before may be.
template <int ROWS>
__device__ __forceinline__ void load_rows(const float* x, int rows, int width, int k, float4 (&found)[ROWS]) {
#pragma unroll
  for (int row = 0; row < ROWS; row++)
    found[row] = row < rows && k < width ? __ldcg(reinterpret_cast<const float4*>(x + int64_t(row) * width + k)) : float4{0, 0, 0, 0};
}

// Adds N values of each lane up over the warp: lane L keeps those from L * N / 32 on, or, of fewer, number L * N / 32.
template <int N>
__device__ __forceinline__ void add_up(float (&value)[N]) {
  const int lane = int(threadIdx.x & 31);
  int left = N;
#pragma unroll
  for (int width = 16; width >= 1; width >>= 1) {
    if (left == 1) {
      value[0] += __shfl_xor_sync(kAll, value[0], width);
      continue;
    }
    left >>= 1;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      if (i >= left) break;
      const bool upper = lane & width;
      const float given = __shfl_xor_sync(kAll, upper ? value[i] : value[i + left], width);
      value[i] = (upper ? value[i + left] : value[i]) + given;
    }
  }
}

// One group of a layer's outputs, for all rows: each thread every 1024th four inputs.
template <int ROWS>
__device__ __forceinline__ void run_group(const Layer& layer, const float* x, float* out, int rows, int group, Weights& weights) {
  constexpr int kSums = ROWS * kOutputs, kPerLane = kSums > 32 ? kSums / 32 : 1, kSame = kSums < 32 ? 32 / kSums : 1;
  constexpr bool kAhead = ROWS <= 8;  // a second set of rows in registers
  float* const of_warps = reinterpret_cast<float*>(dynamic_shared() + kRing);  // [kWarps, kSums]
  const int thread = int(threadIdx.x), o_mine = thread / ROWS, row_mine = thread % ROWS, n = group * layer.outputs + o_mine;
  const bool gives = o_mine < layer.outputs && n < layer.n && row_mine < rows;
  const float bias = gives && layer.bias ? __ldg(layer.bias + n) : 0.0f;
  float sums[kSums] = {};
  float4 now[ROWS], next[kAhead ? ROWS : 1];
  if (kAhead) load_rows(x, rows, layer.k, thread * 4, next);
  for (int k = thread * 4; k - thread * 4 < layer.k; k += kThreads * 4) {
    if constexpr (kAhead) {
#pragma unroll
      for (int row = 0; row < ROWS; row++) now[row] = next[row];
      load_rows(x, rows, layer.k, k + kThreads * 4, next);
    } else {
      load_rows(x, rows, layer.k, k, now);
    }
    weights.wait();
#pragma unroll
    for (int o = 0; o < kOutputs; o++) {
      if (o >= layer.outputs || k >= layer.k) continue;
      const float4 w = weights[o];
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        float& sum = sums[o * ROWS + row];
        sum = fmaf(w.w, now[row].w, fmaf(w.z, now[row].z, fmaf(w.y, now[row].y, fmaf(w.x, now[row].x, sum))));
      }
    }
    weights.give_up();
  }
  add_up(sums);
  const int lane = thread & 31;
  if (lane % kSame == 0)
    for (int i = 0; i < kPerLane; i++) of_warps[(thread >> 5) * kSums + lane / kSame * kPerLane + i] = sums[i];
  __syncthreads();
  if (gives) {
    float sum = bias;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) sum += of_warps[warp * kSums + thread];
    out[int64_t(row_mine) * layer.n + n] = activated(sum, layer.activation);
  }
  __syncthreads();  // the next group writes them
}

template <int ROWS>
__global__ void __launch_bounds__(kThreads, 1) few_rows_kernel(const __grid_constant__ Request request) {
  Weights weights(request);
  const float* x = request.x;
  for (int at = 0; at < request.layers; at++) {
    const Layer& layer = request.layer[at];
    float* out = at + 1 == request.layers ? request.out : request.between + int64_t(at & 1) * request.rows * request.widest;
    for (int group = int(blockIdx.x); group * layer.outputs < layer.n; group += int(gridDim.x))
      run_group<ROWS>(layer, x, out, request.rows, group, weights);
    if (at + 1 < request.layers) grid_barrier();
    x = out;
  }
}

template <int ROWS>
static const char* run(const Request& request, void* stream) {
  int blocks = 0;
  if (const char* text = multiprocessors(&blocks)) return text;
  Request dealt = request;
  int most = 1;
  for (int at = 0; at < request.layers; at++) {
    const int share = (request.layer[at].n + blocks - 1) / blocks;
    dealt.layer[at].outputs = share < kOutputs ? share : kOutputs;
    most = request.layer[at].n > most ? request.layer[at].n : most;
  }
  return launch_together(few_rows_kernel<ROWS>, most < blocks ? most : blocks, kThreads, kShared, stream, dealt);
}

}  // namespace fxopt::few_rows

// Floats alone, every k a multiple of 4, every row of x, weights and results at 16 bytes. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_few_rows(const fxopt::few_rows::Request* request, int, void* stream) {
  using namespace fxopt::few_rows;
  if (request->rows < 1 || request->rows > kMostRows || request->layers < 1 || request->layers > kMostLayers) return "fxopt.gpu_few_rows: expected 1 to 16 rows and layers";
  for (int at = 0; at < request->layers; at++)
    if (request->layer[at].k < 4 || request->layer[at].k % 4 || request->layer[at].n < 1) return "fxopt.gpu_few_rows: expected inputs by fours";
  const int rows = request->rows;
  return rows == 1 ? run<1>(*request, stream) : rows == 2 ? run<2>(*request, stream) : rows <= 4 ? run<4>(*request, stream) : rows <= 8 ? run<8>(*request, stream) : run<16>(*request, stream);
}
