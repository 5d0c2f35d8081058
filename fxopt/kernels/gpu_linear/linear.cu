// What is left of a linear layer once its long dot products were cut in parts, and layers with one output.
#include "../floats.cuh"

namespace fxopt::gpu_linear {

constexpr int kThreads = 256, kRows = 16, kColumns = 64;  // of the result, a block
constexpr int kTail = 96;                                 // the longest rest of a dot product

enum Activation : int32_t { kNone, kRelu, kSigmoid };

__device__ __forceinline__ float activated(float x, int activation) {
  if (activation == kRelu) return x < 0 ? 0.0f : x;  // NaN passes
  return activation == kSigmoid ? 1.0f / (1.0f + expf(-x)) : x;
}

struct Finish {
  const float *partial, *x, *weight, *bias;  // x, weight: the first column of the rest
  float* out;
  int64_t x_stride, weight_stride;
  int32_t parts, m, n, tail, activation;
};

// out[m, n] = activation(sum of partial[part, m, n] + x[m, :tail] . weight[n, :tail] + bias[n]); n is a multiple of 4.
__global__ void __launch_bounds__(kThreads) finish_kernel(const Finish f) {
  __shared__ float x_tail[kRows][kTail], weight_tail[kTail][kColumns + 4];  // 4: rows on other banks
  const int first_row = int(blockIdx.y) * kRows, first_column = int(blockIdx.x) * kColumns, thread = int(threadIdx.x);
  for (int k = thread; k < kRows * f.tail; k += kThreads) {
    const int row = k / f.tail, t = k - row * f.tail;
    x_tail[row][t] = first_row + row < f.m ? __ldg(f.x + (first_row + row) * f.x_stride + t) : 0.0f;
  }
  for (int k = thread; k < kColumns * f.tail; k += kThreads) {
    const int column = k / f.tail, t = k - column * f.tail;
    weight_tail[t][column] = first_column + column < f.n ? __ldg(f.weight + (first_column + column) * f.weight_stride + t) : 0.0f;
  }
  __syncthreads();
  const int row = thread / (kColumns / 4), column = thread % (kColumns / 4) * 4, m = first_row + row, n = first_column + column;
  if (m >= f.m || n >= f.n) return;
  float sum[4];
  for (int d = 0; d < 4; d++) sum[d] = f.bias ? __ldg(f.bias + n + d) : 0.0f;
  const int64_t size = int64_t(f.m) * f.n, at = int64_t(m) * f.n + n;
#pragma unroll 4
  for (int part = 0; part < f.parts; part++) {
    const float4 some = __ldg(reinterpret_cast<const float4*>(f.partial + part * size + at));
    sum[0] += some.x;
    sum[1] += some.y;
    sum[2] += some.z;
    sum[3] += some.w;
  }
  for (int t = 0; t < f.tail; t++)
    for (int d = 0; d < 4; d++) sum[d] = fmaf(x_tail[row][t], weight_tail[t][column + d], sum[d]);
  for (int d = 0; d < 4; d++) sum[d] = activated(sum[d], f.activation);
  *reinterpret_cast<float4*>(f.out + at) = float4{sum[0], sum[1], sum[2], sum[3]};
}

struct Dot {
  const void *x, *weight, *bias;
  void* out;
  int64_t stride;
  int32_t m, k, activation;
};

// out[m] = activation(x[m] . weight + bias): a warp a row.
template <class T>
__global__ void __launch_bounds__(kThreads) dot_kernel(const Dot d) {
  using Bits = typename T::Bits;
  const int row = int(blockIdx.x) * (kThreads / 32) + int(threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= d.m) return;  // the whole warp
  const Bits *from = static_cast<const Bits*>(d.x) + row * d.stride, *weight = static_cast<const Bits*>(d.weight);
  float sum = 0;
#pragma unroll 4
  for (int at = lane; at < d.k; at += 32) sum = fmaf(T::wide(__ldg(from + at)), T::wide(__ldg(weight + at)), sum);
  for (int width = 16; width >= 1; width >>= 1) sum += __shfl_xor_sync(kAll, sum, width);
  if (d.bias) sum += T::wide(__ldg(static_cast<const Bits*>(d.bias)));
  if (lane == 0) static_cast<Bits*>(d.out)[row] = T::rounded(activated(sum, d.activation));
}

}  // namespace fxopt::gpu_linear

#define FXOPT_EXPORT extern "C" __attribute__((visibility("default")))

// Both: nullptr, or what went wrong. The first takes floats alone; dtype: 0 float, 1 half, 2 bfloat16.
FXOPT_EXPORT const char* fxopt_linear_finish(const fxopt::gpu_linear::Finish* f, int, void* stream) {
  using namespace fxopt::gpu_linear;
  if (f->tail > kTail || f->n % 4) return "fxopt.gpu_linear: a rest of at most 96, and outputs by fours";
  const dim3 grid(unsigned((f->n + kColumns - 1) / kColumns), unsigned((f->m + kRows - 1) / kRows));
  return fxopt::launch(finish_kernel, grid, kThreads, stream, *f);
}
FXOPT_EXPORT const char* fxopt_linear_dot(const fxopt::gpu_linear::Dot* d, int dtype, void* stream) {
  using namespace fxopt::gpu_linear;
  const auto kernel = dtype == 0 ? dot_kernel<fxopt::Float> : dtype == 1 ? dot_kernel<fxopt::Half> : dot_kernel<fxopt::BFloat16>;
  return fxopt::launch(kernel, dim3(unsigned((d->m + kThreads / 32 - 1) / (kThreads / 32))), kThreads, stream, *d);
}
