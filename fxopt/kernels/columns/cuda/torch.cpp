// fxopt::columns for CUDA tensors, through torch's stable ABI. The kernels are in another library, which nvcc makes: it
// is handed over by `fxopt_cuda_bind`, so that this file compiles and loads without CUDA.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "../../dispatched.h"
#include "../layout.h"

namespace fxopt {

struct Bound {
  bool (*columns)(const Request*, void* stream, int device, char* text) = nullptr;
  bool (*entries)(const Request*, const Array* grads, void* stream, int device, char* text) = nullptr;
  bool (*dots)(const Request*, const Array* rest, int64_t width, void* stream, int device, char* text) = nullptr;
  AOTITorchError (*current_stream)(int32_t device, void** stream) = nullptr;
};
static Bound bounds[kMostDevices];  // architectures differ

// Tensors of one device.
static Arguments on_device(int device, const std::vector<Tensor>& tensors, const std::vector<Tensor>& tables = {}) {
  for (const auto* list : {&tensors, &tables})
    for (const Tensor& tensor : *list)
      STD_TORCH_CHECK(tensor.get_device_index() == device, "fxopt.columns: tensors on several devices: cuda:", device, " and ", tensor.get_device_index());
  return Arguments(tensors, tables);
}

static void* stream_of(int device) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(bounds[device].current_stream(device, &stream));
  return stream;
}

// On the device's current stream. False: `text` (256 bytes) says what is wrong.
static bool run(const Request& request, int device, char* text) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  return bounds[device].columns(&request, stream_of(device), device, text);
}

// `call(request, text)` on the tensors of a call; the results are what it allocated.
template <class F>
static std::vector<Tensor> with_request(const std::vector<Tensor>& tensors, const std::vector<Tensor>& tables, const Tensor& plan, F call) {
  Results results{{}, tables.empty() ? tensors.at(0).get_device_index() : tables[0].get_device_index()};
  const int device = results.device;
  STD_TORCH_CHECK(bounds[device].columns != nullptr, "fxopt.columns: cuda:", device, " has no kernel: expected fxopt.kernels.columns.op.load_cuda(", device, ") before");
  const Arguments arguments = on_device(device, tensors, tables);
  const Array words = operand_of(plan);
  STD_TORCH_CHECK(plan.is_cpu() && words.dtype == kInt64 && words.dim == 1 && plan.is_contiguous(),
                  "fxopt.columns: the plan must be a contiguous 1-D int64 tensor on the CPU");
  char text[256];
  if (!call(arguments.request(reinterpret_cast<const int64_t*>(words.data), words.sizes[0], results), device, text)) throw std::runtime_error(text);
  return std::move(results.tensors);
}

std::vector<Tensor> columns(const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  std::vector<Tensor> found = with_request(tensors, tables, plan, [](const Request& request, int device, char* text) { return run(request, device, text); });
  found.erase(found.begin() + reinterpret_cast<const Header*>(plan.data_ptr())->n_outputs, found.end());
  return found;
}

// Keys, addresses and factors of what a backward adds up: see backward.h.
std::vector<Tensor> columns_entries(const std::vector<Tensor> grads, const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  auto call = [&](const Request& request, int device, char* text) {
    const Arguments given = on_device(device, grads);
    STD_TORCH_CHECK(int64_t(grads.size()) == reinterpret_cast<const Header*>(request.words)->n_outputs, "fxopt.columns: expected a gradient for each output");
    const torch::stable::accelerator::DeviceGuard guard(device);
    return bounds[device].entries(&request, given.operands().data(), stream_of(device), device, text);
  };
  std::vector<Tensor> found = with_request(tensors, tables, plan, call);
  found.erase(found.begin() + 3, found.end());
  return found;
}

// A row of dots of the vectors that a plan's columns would write: see interactions/cuda/gathered.cu. `rest`: what stands before them, and the pairs.
Tensor columns_dots(const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan, const std::vector<Tensor> rest, int64_t width) {
  auto call = [&](const Request& request, int device, char* text) {
    STD_TORCH_CHECK(bounds[device].dots != nullptr && rest.size() == 3, "fxopt.gathered_dots: cuda:", device, " has no kernel, or not three tensors");
    const Arguments given = on_device(device, rest);
    const torch::stable::accelerator::DeviceGuard guard(device);
    return bounds[device].dots(&request, given.operands().data(), width, stream_of(device), device, text);
  };
  return with_request(tensors, tables, plan, call)[0];
}

}  // namespace fxopt

#define FXOPT_EXPORT extern "C" __attribute__((visibility("default")))
FXOPT_EXPORT void fxopt_cuda_bind(int device, void* columns, void* entries, void* current_stream) {
  fxopt::Bound& bound = fxopt::bounds[device];
  bound.entries = reinterpret_cast<decltype(fxopt::Bound::entries)>(entries);
  bound.current_stream = reinterpret_cast<decltype(fxopt::Bound::current_stream)>(current_stream);
  bound.columns = reinterpret_cast<decltype(fxopt::Bound::columns)>(columns);  // last: who sees it may call
}

FXOPT_EXPORT void fxopt_cuda_bind_dots(int device, void* dots) { fxopt::bounds[device].dots = reinterpret_cast<decltype(fxopt::Bound::dots)>(dots); }

// For entry.cpp, which is another library: how many of the allocated tensors are outputs, or -1 and what is wrong.
FXOPT_EXPORT int64_t fxopt_cuda_run(const fxopt::Request* request, int device, char* text) {
  return fxopt::run(*request, device, text) ? fxopt::Plan(request->words).header->n_outputs : -1;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fxopt, m) {
  m.def("columns_entries(Tensor[] grads, Tensor[] tensors, Tensor[] tables, Tensor plan) -> Tensor[]");
  m.def("columns_dots(Tensor[] tensors, Tensor[] tables, Tensor plan, Tensor[] rest, int width) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fxopt, CUDA, m) {
  m.impl("columns", TORCH_BOX(&fxopt::columns));
  m.impl("columns_entries", TORCH_BOX(&fxopt::columns_entries));
  m.impl("columns_dots", TORCH_BOX(&fxopt::columns_dots));
}
