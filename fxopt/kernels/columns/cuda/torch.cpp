// fxopt::columns for CUDA tensors, through torch's stable ABI and as AOTInductor calls it. The kernels are in another
// library (bound.h), so that this file compiles and loads without CUDA.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <map>
#include <string>
#include <vector>

#include "../../dispatched.h"
#include "../../shims.h"
#include "../names.h"
#include "bound.h"

namespace fxopt {

// Tensors of one device.
static Arguments on_device(int device, const std::vector<Tensor>& tensors, const std::vector<Tensor>& tables = {}) {
  for (const auto* list : {&tensors, &tables})
    for (const Tensor& tensor : *list)
      STD_TORCH_CHECK(tensor.get_device_index() == device, "fxopt.columns: tensors on several devices: cuda:", device, " and ", tensor.get_device_index());
  return Arguments(tensors, tables);
}

static void* stream_of(int device) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(bound_on(device).current_stream(device, &stream));
  return stream;
}

// On the device's current stream. False: `text` (256 bytes) says what is wrong.
static bool run(const Request& request, int device, char* text) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  return bound_on(device).columns(&request, stream_of(device), device, text);
}

// `call(request, text)` on the tensors of a call; the results are what it allocated.
template <class F>
static std::vector<Tensor> with_request(const std::vector<Tensor>& tensors, const std::vector<Tensor>& tables, const Tensor& plan, F call) {
  Results results{{}, tables.empty() ? tensors.at(0).get_device_index() : tables[0].get_device_index()};
  const int device = results.device;
  bound_on(device);
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

// The plans that AOTInductor has called, by their number of words, which an error on the device names (errors.py).
class Plans {
 public:
  void add(const int64_t* words, int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& known = known_[n];
    if (known.empty()) known.assign(words, words + n);
  }

  std::string named(const std::string& text) {
    int column;
    long long plan;
    if (std::sscanf(text.c_str(), "fxopt-bad-id column=%d row=%*d lane=%*d value=%*d rows=%*d plan=%lld", &column, &plan) != 2) return text;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(plan);
    return found == known_.end() ? text : with_names(text, found->second.data(), plan, column);
  }

 private:
  std::map<int64_t, std::vector<int64_t>> known_;
  std::mutex mutex_;
};
static Plans plans;

static void run_named(const Request& request, int device) {
  plans.add(request.words, request.n_words);
  char text[256];
  if (!run(request, device, text)) throw std::runtime_error(plans.named(text));
}

static int32_t device_of(AtenTensorHandle tensor) {
  int32_t device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device));
  return device;
}

}  // namespace fxopt

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

// For AOTInductor, as shims.py declares it.
FXOPT_EXPORT AOTITorchError aoti_torch_cuda_columns(const AtenTensorHandle* tensors, int64_t n_tensors, const AtenTensorHandle* tables, int64_t n_tables, AtenTensorHandle plan, ...) {
  const int32_t device = fxopt::device_of(n_tables ? tables[0] : tensors[0]);
  for (int64_t k = 0; k < n_tensors; k++)
    if (fxopt::device_of(tensors[k]) != device) fxopt::refused("fxopt.columns: expected tensors on cuda:%d, found one elsewhere", device);
  fxopt::CCall call(device);
  call.tensors(tensors, n_tensors);
  call.tensors(tables, n_tables);
  call.plan(plan);
  call.run([&](const fxopt::Request* request) {
    fxopt::run_named(*request, device);
    call.keep(fxopt::Plan(request->words).header->n_outputs);
  });
  va_list results;
  va_start(results, plan);
  call.give(results);
  va_end(results);
  return AOTI_TORCH_SUCCESS;
}

// For C++: whether a call on a device has met a bad id since the last question; `text` (1024 bytes) names it. Waits for
// the device only then, so whoever wants to know of a call waits for its results first.
FXOPT_EXPORT bool fxopt_columns_failed(int device, char* text) {
  if (!fxopt::bounds[device].failure || !fxopt::bounds[device].failure(device, text)) return false;
  snprintf(text, 1024, "%s", fxopt::plans.named(text).c_str());
  return true;
}

STABLE_TORCH_LIBRARY_IMPL(fxopt, CUDA, m) {
  m.impl("columns", TORCH_BOX(&fxopt::columns));
  m.impl("columns_entries", TORCH_BOX(&fxopt::columns_entries));
  m.impl("columns_dots", TORCH_BOX(&fxopt::columns_dots));
}
