// Python tensors from C++, without torch/csrc/autograd/python_variable.h: that header brings pybind11 and costs 10
// CPU-seconds a file, these lines 1.4. What they take on trust, `readable` checks before a library is used.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace fxopt {

// The head of torch's THPVariable.
struct PythonTensor {
  PyObject_HEAD
  at::Tensor tensor;
};
static_assert(sizeof(at::Tensor) == sizeof(void*), "a tensor is one pointer");

// A torch.Tensor or torch.nn.Parameter, and no subclass, whose semantics could differ.
inline bool is_plain(PyObject* object) {
  return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

inline const at::Tensor& tensor_of(PyObject* plain) { return reinterpret_cast<PythonTensor*>(plain)->tensor; }

// Starts the load of an object's cache lines that hold its bytes [begin, end). Never faults.
template <size_t BEGIN, size_t END>
inline void prefetch(const void* object) {
  for (size_t at = BEGIN; at < END; at += 64) __builtin_prefetch(static_cast<const char*>(object) + at);
  __builtin_prefetch(static_cast<const char*>(object) + END - 1);
}

// What a look at a tensor's metadata reads, behind the vtable and the counts; and what one at its storage's data reads.
inline void prefetch_metadata(const at::Tensor& tensor) {
  prefetch<sizeof(c10::intrusive_ptr_target), sizeof(c10::TensorImpl)>(tensor.unsafeGetTensorImpl());
}
inline void prefetch_data_pointer(const at::Tensor& tensor) {
  constexpr size_t kBegin = sizeof(c10::intrusive_ptr_target);
  constexpr size_t kEnd = kBegin + sizeof(c10::DataPtr) + sizeof(c10::SymInt) + 8;  // 8: flags, which a read asks for
  prefetch<kBegin, kEnd>(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

// A function for Python that takes its arguments as they lie, without a tuple.
inline PyMethodDef method(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}

// readable(tensor, tensor._cdata): whether this Python's tensors look as assumed here. Reads the pointer, never follows it.
inline PyObject* readable(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !is_plain(arguments[0])) Py_RETURN_FALSE;
  const void* expected = PyLong_AsVoidPtr(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  const auto* words = reinterpret_cast<void* const*>(reinterpret_cast<PythonTensor*>(arguments[0]) + 1);
  return PyBool_FromLong(words[-1] == expected);
}

}  // namespace fxopt
