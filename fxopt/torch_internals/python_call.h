// What every way into a kernel past the dispatcher asks before it goes there, and what it gives back.
#pragma once
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <exception>
#include <string>
#include <vector>

#include "python_tensor.h"

namespace {

// Dispatch keys of an ordinary CPU tensor; any other (functorch, conjugate, sparse...) goes to the dispatcher.
const uint64_t kPlain = c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
                                             c10::DispatchKey::ADInplaceOrView}).raw_repr();

// Nothing watches or redirects operators in this thread.
bool undisturbed() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.remove(c10::DispatchKey::BackendSelect).remove(c10::DispatchKey::ADInplaceOrView).empty() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && !at::impl::torch_function_mode_enabled() && !at::hasCallbacks();
}

// Runs a kernel without the GIL. False, with the error set in Python, where it threw.
template <class Kernel>
bool ran_without_gil(Kernel kernel) {
  std::string error;
  Py_BEGIN_ALLOW_THREADS
  try {
    kernel();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  Py_END_ALLOW_THREADS
  if (!error.empty()) PyErr_SetString(PyExc_RuntimeError, error.c_str());
  return error.empty();
}

PyObject* as_list(const std::vector<at::Tensor>& tensors) {
  PyObject* list = PyList_New(Py_ssize_t(tensors.size()));
  for (size_t k = 0; list && k < tensors.size(); k++) {
    PyObject* item = THPVariable_Wrap(tensors[k]);
    if (!item) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, Py_ssize_t(k), item);
  }
  return list;
}

}  // namespace
