// How a tensor of Python becomes an operand of a kernel: read by the kernel's call (entry.cpp), or before it by the check
// of a model's call (runtime/tensor_check.h), which looks at the same cache lines.
#pragma once
#include <c10/core/GradMode.h>

#include <cstring>
#include <memory>

#include "../torch_internals/python_call.h"
#include "entry.h"

namespace fxopt {

const uint64_t kPlainCuda = c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
                                                 c10::DispatchKey::ADInplaceOrView}).raw_repr();

// Where the tensors of a call must be. device -1: the CPU.
struct Place {
  bool grad_mode = c10::GradMode::is_enabled();
  uint64_t keys = kPlain;
  int device = -1;

  bool holds(const c10::TensorImpl* impl) const {
    return (impl->key_set().raw_repr() & ~keys) == 0 && impl->unsafe_storage() && !(grad_mode && impl->requires_grad()) &&
           impl->numel() <= kMostElements && (device < 0 || impl->device().index() == device);
  }

  // Where this one is.
  static Place of(const at::Tensor& tensor) {
    Place place;
    if (!tensor.is_cuda()) return place;
    place.keys = kPlainCuda;
    place.device = tensor.device().index();
    return place;
  }
};

// `impl->data()` of a tensor with storage, without asking a virtual function for that.
inline char* data_of(const c10::TensorImpl* impl) {
  if (impl->numel() == 0) return nullptr;
  const auto* data = static_cast<const char*>(impl->unsafe_storage().data());
  return const_cast<char*>(data) + impl->dtype().itemsize() * size_t(impl->storage_offset());
}

inline bool read(PyObject* item, const Place& place, Array& operand) {
  if (item == Py_None && place.device < 0) {
    operand = {nullptr, nullptr, nullptr, -1, 0};
    return true;
  }
  if (!is_plain(item)) return false;
  const c10::TensorImpl* impl = tensor_of(item).unsafeGetTensorImpl();
  if (!place.holds(impl)) return false;
  const auto sizes = impl->sizes();
  operand = {data_of(impl), sizes.data(), impl->strides().data(), int32_t(sizes.size()), int32_t(c10::typeMetaToScalarType(impl->dtype()))};
  return true;
}

// A list of tensors, and once a check has seen that all are plain ones of one device, where each lies. That holds until
// something changes a tensor's own shape or storage.
struct Tensors {
  PyListObject list;
  std::unique_ptr<Array[]> arrays;  // null: nobody looked
  Place place;                      // grad_mode: whether it was on, and then none of them requires gradients
  bool contiguous;                  // all of them

  const Array* at(const Place& wanted) const {
    return place.device == wanted.device && place.grad_mode >= wanted.grad_mode ? arrays.get() : nullptr;
  }
};
constexpr const char* kTensors = "fxopt.Tensors";  // two libraries know the type by its name

inline Tensors* as_tensors(PyObject* object) {
  return std::strcmp(Py_TYPE(object)->tp_name, kTensors) == 0 ? reinterpret_cast<Tensors*>(object) : nullptr;
}

}  // namespace fxopt
