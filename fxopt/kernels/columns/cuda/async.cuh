// Copies into shared memory that a thread does not wait for, by cp.async (sm_80). Without CUDA the shim brings its own.
#pragma once
#include <cuda_runtime.h>

#ifdef __CUDACC__
namespace fxopt::cuda {

// 16 bytes, both addresses aligned so; zeros in place of what is not `real`. What `to` holds is unknown until it is waited for.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool real) {
  const unsigned at = unsigned(__cvta_generic_to_shared(to)), bytes = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}

// The same through L1, for rows that many samples read: 2048 x 27 x 64 halves of two rows a table take 5.8 us so, else 10.6.
__device__ __forceinline__ void copy_async_cached(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

// The same for 4 or 8 bytes that are aligned so, through L1; zeros in place of what is not `real`.
template <int BYTES>
__device__ __forceinline__ void copy_async_few(void* to, const void* from, bool real) {
  const unsigned at = unsigned(__cvta_generic_to_shared(to)), bytes = real ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}

// Copies of this thread since the last call are one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups of this thread but the last PENDING are there, for this thread: others need a barrier after it.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace fxopt::cuda
#endif
