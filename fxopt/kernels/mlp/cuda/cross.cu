// x0 * (x . weight + scale) + bias + x: a warp a row, which it reads twice, the second time from the first-level cache.
#include "../../floats.cuh"

namespace fxopt::cross {

constexpr int kThreads = 256;

struct Cross {
  Operand x0, x, weight, scale, bias, out;  // [rows, columns] and vectors; scale one number; null where there is none
  int32_t rows, columns;
};
static_assert(sizeof(Cross) == 6 * 32 + 8);

template <class T>
__global__ void __launch_bounds__(kThreads) cross_kernel(const __grid_constant__ Cross c) {
  in_turn();
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + int(threadIdx.x >> 5);
  const int lane = int(threadIdx.x) & 31;
  if (row >= c.rows) return;  // the whole warp
  float sum = 0;
#pragma unroll 4
  for (int k = lane; k < c.columns; k += 32)
    sum = fmaf(load<T>(c.x.data, row * c.x.strides[0] + k * c.x.strides[1]), load<T>(c.weight.data, k * c.weight.strides[0]), sum);
  sum = summed(sum);
  if (c.scale.data) sum += load<T>(c.scale.data, 0);
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(c.out.data)) + row * c.columns;
#pragma unroll 4
  for (int k = lane; k < c.columns; k += 32) {
    const float bias = c.bias.data ? load<T>(c.bias.data, k * c.bias.strides[0]) : 0.0f;
    const float x0 = load<T>(c.x0.data, row * c.x0.strides[0] + k * c.x0.strides[1]);
    out[k] = T::rounded(fmaf(x0, sum, bias) + load<T>(c.x.data, row * c.x.strides[0] + k * c.x.strides[1]));
  }
}

}  // namespace fxopt::cross

// dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_cross(const fxopt::cross::Cross* c, int dtype, void* stream) {
  using namespace fxopt::cross;
  auto* kernel = dtype == 0 ? cross_kernel<fxopt::Float> : dtype == 1 ? cross_kernel<fxopt::Half> : cross_kernel<fxopt::BFloat16>;
  return fxopt::launch(kernel, dim3(unsigned((c->rows + kThreads / 32 - 1) / (kThreads / 32))), kThreads, stream, *c);
}
