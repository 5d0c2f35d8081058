// Programmatic dependent launch: a kernel's blocks are on the device before the one in front of it on the stream is done,
// and the time between the two, 0.4 us on an H200, is gone. From sm_90 on; before that, and in the shim, nothing happens.
#pragma once
#include <cuda_runtime.h>

#if defined(__CUDA_ARCH_LIST__) && __CUDA_ARCH_LIST__ >= 900 && CUDART_VERSION >= 12030
#define FXOPT_EARLY 1  // of 12.3: stream captures take it
#else
#define FXOPT_EARLY 0
#endif

namespace fxopt {

// The first statement of every kernel that is launched early. Behind it all that was on the stream before is done and can
// be seen.
__device__ __forceinline__ void wait_for_stream() {
#if FXOPT_EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Behind wait_for_stream(), so that no more than two kernels wait. Without it the next one comes as blocks of this one leave:
// better where it would take the places of blocks that are still to come (H200, E whole at batch 1: 17.9 us, with it 18.8).
__device__ __forceinline__ void let_next_start() {
#if FXOPT_EARLY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// How most kernels begin.
__device__ __forceinline__ void in_turn() {
  wait_for_stream();
  let_next_start();
}

// What a launch that comes early says; null where that is not known.
inline cudaLaunchAttribute* early_attribute() {
#if FXOPT_EARLY
  static cudaLaunchAttribute attribute{};
  static const bool known = [] {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
  }();
  return known ? &attribute : nullptr;
#else
  return nullptr;
#endif
}

// nullptr, or what went wrong. attribute: null for none. shared: bytes of dynamic shared memory.
template <class Parameters>
static const char* launch_with(cudaLaunchAttribute* attribute, void (*kernel)(Parameters), dim3 blocks, int threads, int shared, void* stream, const Parameters& parameters) {
  if (blocks.x == 0) return nullptr;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attribute;
  config.numAttrs = attribute != nullptr;
  cudaError_t error = shared ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) : cudaSuccess;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, parameters);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The same of a kernel that begins with wait_for_stream().
template <class Parameters>
static const char* launch(void (*kernel)(Parameters), dim3 blocks, int threads, void* stream, const Parameters& parameters, int shared = 0) {
  return launch_with(early_attribute(), kernel, blocks, threads, shared, stream, parameters);
}

}  // namespace fxopt
