// Large gradients by calloc. Where it maps memory anew, as malloc does whatever is larger, a page that no id reaches is
// never written, and whoever reads it reads one page of zeros that all of them share. Where a hole in the heap is large
// enough, it is cleared, which takes less time than new pages do (docs/kernels/training.md).
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <new>

#include "call.h"

namespace fxopt {

constexpr int64_t kMappedAnew = 32 << 20;  // bytes; glibc's largest M_MMAP_THRESHOLD
constexpr uintptr_t kLine = 64;            // bytes that a row of as many begins at a multiple of, as in torch's memory

inline int64_t gradient_bytes(const Array& table) { return table.sizes[0] * table.sizes[1] * (table.dtype == kDouble ? 8 : 4); }

inline bool starts_as_zeros(const Array& table) { return gradient_bytes(table) > kMappedAnew && (table.dtype == kFloat || table.dtype == kDouble); }

inline torch::stable::Tensor zeros_like(const Array& table) {
  const int64_t sizes[] = {table.sizes[0], table.sizes[1]}, strides[] = {table.sizes[1], 1};
  void* const memory = calloc(1, gradient_bytes(table) + kLine);
  if (!memory) throw std::bad_alloc();
  void* const data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + kLine - 1) / kLine * kLine);
  const auto type = table.dtype == kDouble ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(data, {sizes, 2}, {strides, 2}, cpu, type, [memory](void*) { free(memory); });
}

}  // namespace fxopt
