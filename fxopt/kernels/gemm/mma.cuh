// D += A B on tensor cores: A 16 x 16, B 16 x 8, D 16 x 8; halves in, floats out. Thread t of a warp holds of A rows t / 4
// and t / 4 + 8 at columns t % 4 * 2 (and + 8), of B column t / 4 at rows t % 4 * 2 (and + 8), of D rows t / 4 (and + 8)
// at columns t % 4 * 2 and the next.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace fxopt::halves {

constexpr unsigned kAll = 0xffffffffu;

#ifdef __CUDACC__
template <bool BFLOAT>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (BFLOAT)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
#include "mma_on_cpu.h"
#endif

}  // namespace fxopt::halves
