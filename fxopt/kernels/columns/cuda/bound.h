// The kernels of each CUDA device, which nvcc makes for its architecture. Python hands them over; a process without it
// finds them beside this library, as a bundle has them (fxopt/export/bundle.py).
#pragma once
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <mutex>
#include <string>

#include "../../entry.h"

namespace fxopt {

struct Bound {
  bool (*columns)(const Request*, void* stream, int device, char* text) = nullptr;
  bool (*entries)(const Request*, const Array* grads, void* stream, int device, char* text) = nullptr;
  bool (*dots)(const Request*, const Array* rest, int64_t width, void* stream, int device, char* text) = nullptr;
  bool (*failure)(int device, char* text) = nullptr;  // of those that were found
  AOTITorchError (*current_stream)(int32_t device, void** stream) = nullptr;
};
static Bound bounds[kMostDevices];

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

// As cuda_build.py names it, "sm_90a"; "" where the driver does not say.
inline std::string arch_of(int device) {
  int (*get)(int* value, int attribute, int device);
  look_up(dlopen("libcuda.so.1", RTLD_NOW), "cuDeviceGetAttribute", get);
  constexpr int kMajor = 75, kMinor = 76;  // of the compute capability, in CUdevice_attribute
  int major, minor;
  if (!get || get(&major, kMajor, device) || get(&minor, kMinor, device)) return "";
  return "sm_" + std::to_string(10 * major + minor) + (major >= 9 ? "a" : "");
}

inline void find_beside(int device) {
  Dl_info own;
  if (!dladdr(reinterpret_cast<void*>(&find_beside), &own)) return;
  const std::string path = own.dli_fname, folder = path.substr(0, path.rfind('/') + 1);
  void* const kernels = dlopen((folder + "fxopt_columns_cuda-" + arch_of(device) + ".so").c_str(), RTLD_NOW);
  Bound& bound = bounds[device];
  look_up(kernels, "fxopt_cuda_entries", bound.entries);
  look_up(kernels, "fxopt_cuda_failure", bound.failure);
  look_up(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream", bound.current_stream);
  if (bound.current_stream) look_up(kernels, "fxopt_cuda_columns", bound.columns);  // last: who sees it may call
}

// A device that has kernels; `refused` says so where there are none.
inline const Bound& bound_on(int device) {
  if (device < 0 || device >= kMostDevices) refused("fxopt.columns: expected tensors on a CUDA device, found them on device %d", device);
  if (!bounds[device].columns) {
    static std::mutex finding;
    const std::lock_guard<std::mutex> lock(finding);
    if (!bounds[device].columns) find_beside(device);
  }
  if (!bounds[device].columns)
    refused("fxopt.columns: cuda:%d has no kernel: expected fxopt.kernels.columns.op.load_cuda(%d) before, or fxopt_columns_cuda-%s.so of a bundle",
            device, device, arch_of(device).c_str());
  return bounds[device];
}

}  // namespace fxopt
