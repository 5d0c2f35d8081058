// What 16 and 32 bits stand for: sums are floats, and are rounded once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "abi.h"
#include "early.cuh"

namespace fxopt {

constexpr unsigned kAll = 0xffffffffu;

struct Float {
  using Bits = float;
  __device__ static float wide(float x) { return x; }
  __device__ static float rounded(float x) { return x; }
};
struct Half {
  using Bits = __half;
  static constexpr bool kBFloat = false;
  __device__ static float wide(__half x) { return __half2float(x); }
  __device__ static __half rounded(float x) { return __float2half_rn(x); }
};
struct BFloat16 {
  using Bits = __nv_bfloat16;
  static constexpr bool kBFloat = true;
  __device__ static float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 rounded(float x) { return __float2bfloat16_rn(x); }
};

// Read or written at once.
template <class X, int SIZE>
struct alignas(SIZE * sizeof(X)) Vector {
  X value[SIZE];
};

// A tensor of up to three dims; strides in elements.
struct Operand {
  const void* data;
  int64_t strides[3];
};

template <class T>
__device__ __forceinline__ float load(const void* data, int64_t at) {
  return T::wide(__ldg(static_cast<const typename T::Bits*>(data) + at));
}

// As torch computes it in fp32.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Of a warp, for all of it.
__device__ __forceinline__ float summed(float x) {
  for (int width = 16; width >= 1; width >>= 1) x += __shfl_xor_sync(kAll, x, width);
  return x;
}

}  // namespace fxopt
