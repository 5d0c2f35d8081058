// fxopt::columns on the CPU: torch's stable ABI around the kernels of tile.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../scratch.h"
#include "../simd/cpu.h"
#include "checked.h"
#include "entry.h"
#include "row_gradients.h"
#include "schedule.h"

namespace fxopt {

static_assert(int(torch::headeronly::ScalarType::Float) == kFloat && int(torch::headeronly::ScalarType::Bool) == kBool);
static_assert(int(torch::headeronly::ScalarType::BFloat16) == kBFloat16 && int(torch::headeronly::ScalarType::Long) == kInt64);

static const Kernels* kernels = FXOPT_BEST(kernels, std::getenv("FXOPT_ISA"));
FXOPT_EXPORT void fxopt_columns_isa(const char* limit) { kernels = FXOPT_BEST(kernels, limit); }  // for tests

static void run(const Request& request) {
  check_counts(request.words, request.n_words);
  Call call{Plan(request.words), request.tensors, request.tables, request.n_tensors, request.n_tables, nullptr, scratch};
  const int64_t n = call.plan.header->n_outputs;
  thread_local std::vector<OutputData> outputs;
  outputs.resize(n);
  for (int64_t o = 0; o < n; o++) {
    outputs[o] = measure(call, call.plan.outputs[o]);
    outputs[o].data = request.allocate(request.context, outputs[o].rows, outputs[o].width, call.plan.outputs[o].dtype);
  }
  call.outputs = outputs.data();
  Error error;
  run_all(call, *kernels, error);
  if (error.failed()) throw std::runtime_error(error.text);
}

using torch::stable::Tensor;

static Array as_array(const Tensor& tensor) {
  if (tensor.numel() > kMostElements) refused("fxopt.columns: a tensor with more numbers than a memory holds");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return {static_cast<char*>(tensor.data_ptr()), sizes.data(), strides.data(), int32_t(sizes.size()), dtype};
}

static std::vector<Array> as_arrays(const std::vector<Tensor>& tensors) {
  std::vector<Array> arrays;
  arrays.reserve(tensors.size());
  for (const Tensor& tensor : tensors) arrays.push_back(as_array(tensor));
  return arrays;
}

static char* allocate(void* context, int64_t rows, int64_t width, int32_t dtype) {
  const int64_t sizes[2] = {rows, width}, strides[2] = {width > 1 ? width : 1, 1};
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
  auto& results = *static_cast<std::vector<Tensor>*>(context);
  results.emplace_back(handle);
  return static_cast<char*>(results.back().data_ptr());
}

// The words of a plan that may come from anywhere.
static Array words_of(const Tensor& plan) {
  const Array words = as_array(plan);
  if (words.dtype != kInt64 || words.dim != 1 || !plan.is_contiguous()) refused("fxopt.columns: the plan must be a contiguous 1-D int64 tensor");
  check_counts(reinterpret_cast<const int64_t*>(words.data), words.sizes[0]);
  check_records(Plan(reinterpret_cast<const int64_t*>(words.data)));
  return words;
}

std::vector<Tensor> columns(const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  const std::vector<Array> inputs = as_arrays(tensors), weights = as_arrays(tables);
  const Array words = words_of(plan);
  std::vector<Tensor> results;
  run({inputs.data(), weights.data(), int64_t(inputs.size()), int64_t(weights.size()),
       reinterpret_cast<const int64_t*>(words.data), words.sizes[0], allocate, &results});
  return results;
}

// A call of a backward; the outputs hold their gradients.
struct Backward {
  std::vector<Array> inputs, weights;
  std::vector<OutputData> outputs;
  Call call;

  Backward(const std::vector<Tensor>& grads, const std::vector<Tensor>& tensors, const std::vector<Tensor>& tables, const Tensor& plan)
      : inputs(as_arrays(tensors)), weights(as_arrays(tables)), call(checked(plan, *this)) {
    if (int64_t(grads.size()) != call.plan.header->n_outputs) refused("fxopt.columns_backward: expected a gradient per output");
    for (size_t o = 0; o < grads.size(); o++) {
      const Array grad = as_array(grads[o]);
      if (grad.dim != 2 || grad.dtype != call.plan.outputs[o].dtype || !grads[o].is_contiguous())
        refused("fxopt.columns_backward: gradient %lld must be contiguous, 2-D and of its output's dtype", (long long)o);
      outputs.push_back({grad.data, grad.sizes[0], grad.sizes[1]});
    }
    for (const Array& table : weights)
      if (table.dim != 2) refused("fxopt.columns_backward: a table must be 2-D");
    call.outputs = outputs.data();
  }

  static Call checked(const Tensor& plan, const Backward& self) {
    const Array words = words_of(plan);
    return {Plan(reinterpret_cast<const int64_t*>(words.data)), self.inputs.data(), self.weights.data(),
            int64_t(self.inputs.size()), int64_t(self.weights.size()), nullptr, scratch};
  }
};

// The gradients of all tables of a plan, dense and contiguous, from those of its outputs.
std::vector<Tensor> columns_backward(
    const std::vector<Tensor> grads, const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  const Backward backward(grads, tensors, tables, plan);
  std::vector<Tensor> results;
  std::vector<char*> data;
  for (const Array& table : backward.weights) data.push_back(allocate(&results, table.sizes[0], table.sizes[1], table.dtype));
  Error error;
  scatter_all(backward.call, *kernels, data, error);
  if (error.failed()) throw std::runtime_error(error.text);
  return results;
}

// The same as the rows that are touched: for each table their numbers int64 [1, U], growing, and gradients [U, D].
std::vector<Tensor> columns_row_gradients(
    const std::vector<Tensor> grads, const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  const Backward backward(grads, tensors, tables, plan);
  std::vector<Tensor> results;
  Error error;
  row_gradients(backward.call, *kernels, error, [&](const Array& table, int64_t touched) {
    char* rows = allocate(&results, 1, touched, kInt64);
    return std::make_pair(reinterpret_cast<int64_t*>(rows), allocate(&results, touched, table.sizes[1], table.dtype));
  });
  if (error.failed()) throw std::runtime_error(error.text);
  return results;
}

}  // namespace fxopt

// For entry.cpp, which is another library, and for tests: which instruction set runs ("avx512", "avx2", "scalar").
FXOPT_EXPORT void fxopt_columns_run(const fxopt::Request* request) { fxopt::run(*request); }

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, m) {
  m.impl("columns", TORCH_BOX(&fxopt::columns));
  m.impl("columns_backward", TORCH_BOX(&fxopt::columns_backward));
  m.impl("columns_row_gradients", TORCH_BOX(&fxopt::columns_row_gradients));
}
