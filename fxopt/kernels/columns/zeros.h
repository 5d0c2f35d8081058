// Large gradients in memory that the system hands out as zeros: a page that no id reaches is never written, and whoever
// reads it reads one page of zeros that all of them share. malloc maps anew whatever is larger, so nothing is lost.
#pragma once
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <new>

#include "call.h"

namespace fxopt {

constexpr int64_t kMappedAnew = 32 << 20;  // bytes; glibc's largest M_MMAP_THRESHOLD

inline int64_t gradient_bytes(const Array& table) { return table.sizes[0] * table.sizes[1] * (table.dtype == kDouble ? 8 : 4); }

inline bool starts_as_zeros(const Array& table) { return gradient_bytes(table) > kMappedAnew && (table.dtype == kFloat || table.dtype == kDouble); }

inline torch::stable::Tensor zeros_like(const Array& table) {
  const int64_t bytes = gradient_bytes(table), sizes[] = {table.sizes[0], table.sizes[1]}, strides[] = {table.sizes[1], 1};
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  const auto type = table.dtype == kDouble ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(memory, {sizes, 2}, {strides, 2}, cpu, type, [bytes](void* data) { munmap(data, bytes); });
}

}  // namespace fxopt
