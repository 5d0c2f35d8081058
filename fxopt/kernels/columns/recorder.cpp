// Calls of fxopt::columns that need gradients in their tables alone, recorded in C++ (recorder.py).
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../../torch_internals/python_call.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

PyObject* by_definition;  // a function of Python, for gradients that PyTorch's own operators must compute

bool is_plain_cpu(const at::Tensor& tensor) { return (tensor.key_set().raw_repr() & ~kPlain) == 0; }

std::vector<at::Tensor> tensors_of(PyObject* list) {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(list); k++) {
    PyObject* item = PyList_GET_ITEM(list, k);
    if (item == Py_None) tensors.emplace_back();
    else tensors.push_back(fxopt::tensor_of(item));
  }
  return tensors;
}

// Holds the GIL for as long as it lives, and an error of Python becomes one of C++.
struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }

  [[noreturn]] static void rethrow() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* text = value ? PyObject_Str(value) : nullptr;
    const char* words = text ? PyUnicode_AsUTF8(text) : nullptr;
    const std::string message = words ? words : "fxopt.columns: an error of Python without words";
    for (PyObject* each : {type, value, trace, text}) Py_XDECREF(each);
    throw std::runtime_error(message);
  }
};

variable_list as_defined(const variable_list& grads, at::TensorList tensors, at::TensorList tables, const at::Tensor& plan) {
  const Gil gil;
  const auto list_of = [](at::TensorList given) {
    PyObject* list = as_list({given.begin(), given.end()});  // None where a gradient does not flow
    if (!list) Gil::rethrow();
    return list;
  };
  PyObject* arguments[] = {list_of(grads), list_of(tensors), list_of(tables), THPVariable_Wrap(plan)};
  PyObject* found = PyObject_Vectorcall(by_definition, arguments, 4, nullptr);
  for (PyObject* argument : arguments) Py_DECREF(argument);
  if (!found) Gil::rethrow();
  variable_list gradients = tensors_of(found);
  Py_DECREF(found);
  return gradients;
}

std::vector<at::Tensor> by_kernel(variable_list& grads, at::TensorList tensors, at::TensorList tables, const at::Tensor& plan) {
  static const auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("fxopt::columns_backward", "")
      .typed<std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList, const at::Tensor&)>();
  for (at::Tensor& grad : grads) grad = grad.contiguous();
  const at::AutoDispatchBelowAutograd below;
  return kernel.call(grads, tensors, tables, plan);
}

struct Columns : torch::autograd::Function<Columns> {
  // outputs: of the call. Tables may be edited before the backward, which reads their sizes alone.
  static variable_list forward(
      AutogradContext* context, at::TensorList tables, variable_list& outputs, const variable_list& tensors,
      const std::pair<at::Tensor, at::Tensor>& plans) {
    variable_list saved{plans.first, plans.second};
    for (const at::Tensor& table : tables) saved.push_back(table.variable_data());
    saved.insert(saved.end(), tensors.begin(), tensors.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["tables"] = int64_t(tables.size());
    context->set_materialize_grads(false);
    return std::move(outputs);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const auto n = size_t(context->saved_data["tables"].toInt());
    const at::TensorList all = saved, tables = all.slice(2, n), tensors = all.slice(2 + n);
    const auto is_plain = [](const at::Tensor& grad) { return grad.defined() && is_plain_cpu(grad); };
    const bool once = !at::GradMode::is_enabled() && std::all_of(grads.begin(), grads.end(), is_plain);
    variable_list found = once ? by_kernel(grads, tensors, tables, saved[1]) : as_defined(grads, tensors, tables, saved[0]);
    found.resize(n + 3);  // the other arguments of forward have no gradients
    return found;
  }
};

bool are_plain(PyObject* list) {
  if (!PyList_Check(list)) return false;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(list); k++)
    if (!fxopt::is_plain(PyList_GET_ITEM(list, k))) return false;
  return true;
}

bool all_require_grad(const variable_list& tensors, bool required) {
  return std::all_of(tensors.begin(), tensors.end(), [required](const at::Tensor& tensor) {
    return is_plain_cpu(tensor) && tensor.requires_grad() == required;
  });
}

// record(way past the dispatcher, tensors, tables, plan, plan of the backward) -> its outputs, or None: record it otherwise.
PyObject* record(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  if (n_arguments != 5 || !undisturbed() || !are_plain(arguments[1]) || !are_plain(arguments[2])) Py_RETURN_NONE;
  const variable_list tensors = tensors_of(arguments[1]), tables = tensors_of(arguments[2]);
  if (!all_require_grad(tensors, false) || !all_require_grad(tables, true)) Py_RETURN_NONE;
  PyObject* found;
  {
    const at::NoGradGuard nothing_to_record;
    found = PyObject_Vectorcall(arguments[0], arguments + 1, 3, nullptr);
  }
  if (!found || found == Py_None) return found;
  variable_list outputs = tensors_of(found);
  Py_DECREF(found);
  const std::pair plans(fxopt::tensor_of(arguments[3]), fxopt::tensor_of(arguments[4]));
  try {
    return as_list(Columns::apply(at::TensorList(tables), outputs, tensors, plans));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* define(PyObject*, PyObject* function) {
  by_definition = Py_NewRef(function);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    fxopt::method("record", record),
    {"define", &define, METH_O, nullptr},
    fxopt::method("readable", fxopt::readable),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_recorder", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_recorder() { return PyModule_Create(&module); }
