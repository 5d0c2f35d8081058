// The dispatcher's way into a kernel, through torch's stable ABI.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "entry.h"

namespace fxopt {

using torch::stable::Tensor;

inline Operand operand_of(const Tensor& tensor) {
  if (tensor.numel() > kMostElements) refused("fxopt: a tensor with more numbers than a memory holds");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return {static_cast<char*>(tensor.data_ptr()), sizes.data(), strides.data(), int32_t(sizes.size()), dtype};
}

inline void append(const Tensor& tensor, std::vector<Operand>& operands) { operands.push_back(operand_of(tensor)); }

inline void append(const std::optional<Tensor>& tensor, std::vector<Operand>& operands) {
  operands.push_back(tensor ? operand_of(*tensor) : Operand{nullptr, nullptr, nullptr, -1, 0});
}

template <class Items>
inline void append(const std::vector<Items>& items, std::vector<Operand>& operands) {
  for (const Items& item : items) append(item, operands);
}

inline char* allocate_tensor(void* context, int32_t dim, const int64_t* sizes, int32_t dtype) {
  std::vector<int64_t> strides(dim, 1);
  for (int32_t d = dim - 1; d > 0; d--) strides[d - 1] = strides[d] * (sizes[d] > 1 ? sizes[d] : 1);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &handle));
  auto& results = *static_cast<std::vector<Tensor>*>(context);
  results.emplace_back(handle);
  return static_cast<char*>(results.back().data_ptr());
}

// Runs the kernel on tensors, optional tensors and vectors of either.
template <class... Arguments>
std::vector<Tensor> run_dispatched(void (*run)(const Request&), const std::vector<int64_t>& words, const Arguments&... arguments) {
  std::vector<Operand> operands;
  (append(arguments, operands), ...);
  std::vector<Tensor> results;
  run({operands.data(), int64_t(operands.size()), words.data(), int64_t(words.size()), allocate_tensor, &results});
  return results;
}

}  // namespace fxopt
