// Launches whose blocks all run at once, so that they can wait for each other. Without CUDA the shim brings its own.
#pragma once
#include <cuda_runtime.h>

#ifdef __CUDACC__
#include <cooperative_groups.h>

#include "early.cuh"

namespace fxopt {

// Every thread of the grid; what they wrote before it is seen behind it, past L1. Its counter is the driver's, one a launch.
__device__ __forceinline__ void grid_barrier() { cooperative_groups::this_grid().sync(); }

__device__ __forceinline__ float4* dynamic_shared() {
  extern __shared__ float4 shared[];
  return shared;
}

// Of the current device. nullptr, or what went wrong.
static const char* multiprocessors(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// nullptr, or what went wrong: also where not all blocks fit on the device at once, instead of a deadlock.
template <class Parameters>
static const char* launch_together(void (*kernel)(Parameters), int blocks, int threads, int shared, void* stream, const Parameters& parameters) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  return launch_with(&together, kernel, dim3(unsigned(blocks)), threads, shared, stream, parameters);
}

}  // namespace fxopt
#endif
