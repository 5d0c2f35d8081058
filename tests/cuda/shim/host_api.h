// The runtime calls that host.h makes. Device memory is host memory that starts as poison.
#pragma once


using cudaError_t = int;
using cudaStream_t = struct ShimStream*;
enum { cudaSuccess = 0, cudaStreamNonBlocking = 1, cudaHostAllocMapped = 2, cudaHostAllocPortable = 1, cudaDevAttrMultiProcessorCount = 16 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };

namespace shim {
inline cudaError_t allocate(void** out, size_t bytes) {
  char* memory = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  memset(memory, 0xff, bytes);
  named[memory] = bytes;
  *out = memory;
  return cudaSuccess;
}
}  // namespace shim

inline const char* cudaGetErrorString(cudaError_t) { return "an error of the shim"; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { *value = 1; return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) { *stream = nullptr; return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return shim::allocate(out, bytes); }
inline cudaError_t cudaMalloc(void** out, size_t bytes) { return shim::allocate(out, bytes); }
inline cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned) { *out = host; return cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { memcpy(to, from, bytes); return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) { return cudaMemcpy(to, from, bytes, kind); }

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }

template <class Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters), const Parameters& parameters) {
  shim::Scheduler& scheduler = shim::Scheduler::it();
  scheduler.random.seed(shim::seed);
  scheduler.body = [&] { kernel(parameters); };
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  const unsigned across = config->gridDim.x, blocks = across * config->gridDim.y * config->gridDim.z;
  for (unsigned b = 0; b < blocks && shim::problem.empty(); b++) {
    const dim3 block(b % across, b / across % config->gridDim.y, b / across / config->gridDim.y);
    scheduler.run({block}, int(config->blockDim.x), config->dynamicSmemBytes);
  }
  return cudaSuccess;
}

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))
SHIM_EXPORT void shim_name(const char* memory, size_t bytes) { shim::named[memory] = bytes; }
SHIM_EXPORT void shim_forget(const char* memory) { shim::named.erase(memory); }
SHIM_EXPORT void shim_seed(uint64_t seed) { shim::seed = seed; }
SHIM_EXPORT void shim_plant(int bug) { shim::planted = bug; }
// The first problem since the last question, "" for none.
SHIM_EXPORT void shim_problem(char* text) {
  snprintf(text, 256, "%s", shim::problem.c_str());
  shim::problem.clear();
}
