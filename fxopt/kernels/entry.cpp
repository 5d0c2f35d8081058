// Python's own way into the kernels, past the dispatcher: it takes plain CPU tensors with nothing to record, reads
// them where they are and calls the kernel. For everything else it answers None.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <vector>

#include "entry.h"
#include "../torch_internals/python_call.h"

namespace {

using Run = void (*)(const fxopt::Request*);

bool append_one(PyObject* item, bool grad_mode, std::vector<fxopt::Operand>& operands) {
  if (item == Py_None) {
    operands.push_back({nullptr, nullptr, nullptr, -1, 0});
    return true;
  }
  if (!fxopt::is_plain(item)) return false;
  c10::TensorImpl* impl = fxopt::tensor_of(item).unsafeGetTensorImpl();
  if ((impl->key_set().raw_repr() & ~kPlain) != 0 || (grad_mode && impl->requires_grad()) || impl->numel() > fxopt::kMostElements) return false;
  const auto sizes = impl->sizes();
  operands.push_back({static_cast<char*>(const_cast<void*>(impl->data())), sizes.data(), impl->strides().data(),
                      int32_t(sizes.size()), int32_t(c10::typeMetaToScalarType(impl->dtype()))});
  return true;
}

bool append(PyObject* argument, bool grad_mode, std::vector<fxopt::Operand>& operands) {
  if (!PyList_CheckExact(argument) && !PyTuple_CheckExact(argument)) return append_one(argument, grad_mode, operands);
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(argument);
  PyObject** items = PySequence_Fast_ITEMS(argument);
  for (Py_ssize_t k = 0; k < n; k++)
    if (!append_one(items[k], grad_mode, operands)) return false;
  return true;
}

char* allocate(void* context, int32_t dim, const int64_t* sizes, int32_t dtype) {
  auto& results = *static_cast<std::vector<at::Tensor>*>(context);
  results.push_back(at::empty(at::IntArrayRef(sizes, size_t(dim)), at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype))));
  return static_cast<char*>(results.back().mutable_data_ptr());
}

// The kernel at `address` on arguments that are a tensor, None, or a list of those, and last the plan, an int64 tensor.
// Returns its outputs, or None: use the dispatcher. The caller's lists must not change meanwhile, since the GIL is
// released and they alone keep the tensors alive.
PyObject* call(PyObject* address, PyObject* const* arguments, Py_ssize_t n_arguments) {
  const Run run = reinterpret_cast<Run>(PyLong_AsVoidPtr(address));
  const bool grad_mode = c10::GradMode::is_enabled();
  thread_local std::vector<fxopt::Operand> operands;
  operands.clear();
  if (n_arguments == 0 || !undisturbed()) Py_RETURN_NONE;
  for (Py_ssize_t k = 0; k < n_arguments; k++)
    if (!append(arguments[k], grad_mode, operands)) Py_RETURN_NONE;
  const fxopt::Operand plan = operands.back();
  if (plan.dtype != fxopt::kDtypeInt64 || plan.dim != 1 || plan.strides[0] != 1) Py_RETURN_NONE;
  std::vector<at::Tensor> results;
  const fxopt::Request request{operands.data(), int64_t(operands.size()) - 1, reinterpret_cast<const int64_t*>(plan.data),
                               plan.sizes[0], allocate, &results};
  return ran_without_gil([&] { run(&request); }) ? as_list(results) : nullptr;
}

PyMethodDef called = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)), METH_FASTCALL, nullptr};

// bind(address of a kernel's `void run(const Request*)`) -> a function
PyObject* bind(PyObject*, PyObject* address) {
  PyLong_AsVoidPtr(address);
  return PyErr_Occurred() ? nullptr : PyCFunction_New(&called, address);
}

PyMethodDef methods[] = {
    {"bind", &bind, METH_O, nullptr},
    {"readable", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fxopt::readable)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_entry", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_entry() { return PyModule_Create(&module); }
