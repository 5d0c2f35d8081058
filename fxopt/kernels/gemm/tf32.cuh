// D += A B on tensor cores in TF32: A 16 x 8, B 8 x 8, D 16 x 8; sums are floats. Thread t of a warp holds of A rows t / 4
// and t / 4 + 8 at column t % 4 (and + 4), of B column t / 4 at rows t % 4 (and + 4), of D rows t / 4 (and + 8) at columns
// t % 4 * 2 and the next.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace fxopt::tf32 {

#ifdef __CUDACC__
// To 10 bits of mantissa.
__device__ __forceinline__ float rounded(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

__device__ __forceinline__ void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
#else
#include "tf32_on_cpu.h"
#endif

// Floats as the product takes them. EXACT: in two parts, of which three products make one of 21 bits.
template <int SIZE, bool EXACT>
struct Fragment {
  float big[SIZE], small[EXACT ? SIZE : 1];

  __device__ __forceinline__ void set(int k, float x) {
    big[k] = rounded(x);
    if constexpr (EXACT) small[k] = rounded(x - big[k]);
  }
};

template <bool EXACT>
__device__ __forceinline__ void multiply(float (&d)[4], const Fragment<4, EXACT>& a, const Fragment<2, EXACT>& b) {
  if constexpr (EXACT) {
    mma(d, a.small, b.big);
    mma(d, a.big, b.small);
  }
  mma(d, a.big, b.big);
}

}  // namespace fxopt::tf32
