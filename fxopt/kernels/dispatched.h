// The dispatcher's way into a kernel, through torch's stable ABI.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "entry.h"

namespace fxopt {

using torch::stable::Tensor;

inline Array operand_of(const Tensor& tensor) {
  if (tensor.numel() > kMostElements) refused("fxopt: a tensor with more numbers than a memory holds");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return {static_cast<char*>(tensor.data_ptr()), sizes.data(), strides.data(), int32_t(sizes.size()), dtype};
}

// Contiguous memory. device -1: on the CPU, else on that CUDA device.
inline AtenTensorHandle empty_handle(int32_t device, int32_t dim, const int64_t* sizes, int32_t dtype) {
  const int32_t type = device < 0 ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  std::vector<int64_t> strides(dim, 1);
  for (int32_t d = dim - 1; d > 0; d--) strides[d - 1] = strides[d] * (sizes[d] > 1 ? sizes[d] : 1);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides.data(), dtype, type, device < 0 ? 0 : device, &handle));
  return handle;
}

// What a call allocates.
struct Results {
  std::vector<Tensor> tensors;
  int32_t device = -1;

  static char* allocate(void* context, int32_t dim, const int64_t* sizes, int32_t dtype) {
    auto& results = *static_cast<Results*>(context);
    results.tensors.emplace_back(empty_handle(results.device, dim, sizes, dtype));
    return static_cast<char*>(results.tensors.back().data_ptr());
  }
};

// The arguments of a call: tensors, optional tensors, and vectors of either.
class Arguments {
 public:
  template <class... All>
  explicit Arguments(const All&... arguments) {
    (add(arguments), ...);
  }

  const std::vector<Array>& operands() const { return operands_; }

  Request request(const int64_t* words, int64_t n_words, Results& results) const {
    return {operands_.data(), counts_.data(), int64_t(operands_.size()), int64_t(counts_.size()), words, n_words, Results::allocate, &results};
  }

 private:
  template <class Argument>
  void add(const Argument& argument) {
    const size_t before = operands_.size();
    append(argument);
    counts_.push_back(int64_t(operands_.size() - before));
  }

  void append(const Tensor& tensor) { operands_.push_back(operand_of(tensor)); }

  void append(const std::optional<Tensor>& tensor) {
    operands_.push_back(tensor ? operand_of(*tensor) : Array{nullptr, nullptr, nullptr, -1, 0});
  }

  template <class Items>
  void append(const std::vector<Items>& items) {
    for (const Items& item : items) append(item);
  }

  std::vector<Array> operands_;
  std::vector<int64_t> counts_;
};

// Runs a kernel of the CPU.
template <class... All>
std::vector<Tensor> run_dispatched(void (*run)(const Request*), const std::vector<int64_t>& words, const All&... arguments) {
  Results results;
  const Arguments given(arguments...);
  const Request request = given.request(words.data(), int64_t(words.size()), results);
  run(&request);
  return std::move(results.tensors);
}

template <size_t... k>
auto as_tuple(const std::vector<Tensor>& tensors, std::index_sequence<k...>) {
  return std::make_tuple(tensors[k]...);
}
template <size_t n>
auto as_tuple(const std::vector<Tensor>& tensors) {
  return as_tuple(tensors, std::make_index_sequence<n>());
}

}  // namespace fxopt
