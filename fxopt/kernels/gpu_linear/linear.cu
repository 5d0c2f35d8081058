// Linear layers that leave cuBLAS idle: short dot products, what is left of long ones cut in parts, and single outputs.
#include "short.cuh"
#include "short_halves.cuh"

namespace fxopt::gpu_linear {

struct Dot {
  const void *x, *weight, *bias;
  void* out;
  int64_t stride;
  int32_t m, k, activation;
};

constexpr int kDotThreads = 256;

// out[m] = activation(x[m] . weight + bias): a warp a row.
template <class T>
__global__ void __launch_bounds__(kDotThreads) dot_kernel(const Dot d) {
  using Bits = typename T::Bits;
  const int row = int(blockIdx.x) * (kDotThreads / 32) + int(threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= d.m) return;  // the whole warp
  const Bits *from = static_cast<const Bits*>(d.x) + row * d.stride, *weight = static_cast<const Bits*>(d.weight);
  float sum = 0;
#pragma unroll 4
  for (int at = lane; at < d.k; at += 32) sum = fmaf(T::wide(__ldg(from + at)), T::wide(__ldg(weight + at)), sum);
  sum = summed(sum);
  if (d.bias) sum += T::wide(__ldg(static_cast<const Bits*>(d.bias)));
  float found[1] = {sum};
  activate(found, d.activation);
  if (lane == 0) static_cast<Bits*>(d.out)[row] = T::rounded(found[0]);
}

struct Padded {
  const uint16_t* from;
  uint16_t* out;  // [rows, width]
  int64_t stride;
  int32_t rows, columns, width;  // width: a multiple of 8
};

// Rows of halves with zeros behind them: a thread 16 bytes.
__global__ void __launch_bounds__(kThreads) pad_kernel(const Padded p) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + int(threadIdx.x);
  const int eights = p.width / kEight;
  const int64_t row = thread / eights;
  const int column = int(thread - row * eights) * kEight;
  if (row >= p.rows) return;
  Vector<uint16_t, kEight> eight;
#pragma unroll
  for (int k = 0; k < kEight; k++) eight.value[k] = column + k < p.columns ? __ldg(p.from + row * p.stride + column + k) : uint16_t(0);
  *reinterpret_cast<Vector<uint16_t, kEight>*>(p.out + row * p.width + column) = eight;
}

static unsigned blocks_for(int64_t size, int each) { return unsigned((size + each - 1) / each); }

template <int ROWS, int PARTS = 0>
static const char* launch_floats(const Short& s, void* stream) {
  const dim3 blocks(blocks_for(s.m, Tile<ROWS>::kRows), blocks_for(s.n, Tile<ROWS>::kColumns));
  return launch(short_kernel<ROWS, PARTS>, blocks, kThreads, stream, s);
}

template <class T, int ROWS, int COLUMNS>
static const char* launch_halves(const Short& s, void* stream) {
  const dim3 blocks(blocks_for(s.m, kThreads / 32 * ROWS * 16), blocks_for(s.n, COLUMNS * 8));
  return launch(short_halves_kernel<T, ROWS, COLUMNS>, blocks, kThreads, stream, s);
}

template <class T>
static const char* launch_halves(const Short& s, void* stream) {
  return s.tall ? launch_halves<T, 2, 4>(s, stream) : launch_halves<T, 1, 4>(s, stream);
}

}  // namespace fxopt::gpu_linear

#define FXOPT_EXPORT extern "C" __attribute__((visibility("default")))

// All: nullptr, or what went wrong. dtype: 0 float, 1 half, 2 bfloat16.
FXOPT_EXPORT const char* fxopt_linear_short(const fxopt::gpu_linear::Short* s, int dtype, void* stream) {
  using namespace fxopt::gpu_linear;
  if (s->k > kMostIn) return "fxopt.gpu_linear: dot products of at most 64";
  if (dtype == 1) return launch_halves<fxopt::Half>(*s, stream);
  if (dtype == 2) return launch_halves<fxopt::BFloat16>(*s, stream);
  return s->tall ? launch_floats<4>(*s, stream) : launch_floats<1>(*s, stream);
}
// Floats alone.
FXOPT_EXPORT const char* fxopt_linear_finish(const fxopt::gpu_linear::Short* s, int, void* stream) {
  using namespace fxopt::gpu_linear;
  if (s->k > kMostIn || s->n % 4) return "fxopt.gpu_linear: a rest of at most 64, and outputs by fours";
  return launch_floats<1, kParts>(*s, stream);
}
FXOPT_EXPORT const char* fxopt_linear_dot(const fxopt::gpu_linear::Dot* d, int dtype, void* stream) {
  using namespace fxopt::gpu_linear;
  const auto kernel = dtype == 0 ? dot_kernel<fxopt::Float> : dtype == 1 ? dot_kernel<fxopt::Half> : dot_kernel<fxopt::BFloat16>;
  return fxopt::launch(kernel, dim3(blocks_for(d->m, kDotThreads / 32)), kDotThreads, stream, *d);
}
FXOPT_EXPORT const char* fxopt_linear_pad(const fxopt::gpu_linear::Padded* p, int, void* stream) {
  using namespace fxopt::gpu_linear;
  if (p->width % kEight) return "fxopt.gpu_linear: a width of a multiple of 8";
  return fxopt::launch(pad_kernel, dim3(blocks_for(int64_t(p->rows) * (p->width / kEight), kThreads)), kThreads, stream, *p);
}
