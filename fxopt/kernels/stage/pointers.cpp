// Addresses and shapes of a thousand Python tensors at C speed.
#include <ATen/ops/empty.h>

#include "../operand.h"

#include <cstdint>
#include <cstring>

namespace {

// The arguments (tensors, at) of each function below: a list or a tuple of tensors, and where the words about them are.
struct Arguments {
  PyObject** items;
  Py_ssize_t count;
  void* at;
  const fxopt::Array* arrays = nullptr;  // where contiguous ones lie, if the check of the call has seen that

  // False: an error is set.
  bool read(PyObject* const* arguments, Py_ssize_t n_arguments) {
    if (n_arguments != 2 || !(PyList_Check(arguments[0]) || PyTuple_CheckExact(arguments[0]))) {
      PyErr_SetString(PyExc_TypeError, "expected a list or a tuple of tensors, and an address");
      return false;
    }
    count = PySequence_Fast_GET_SIZE(arguments[0]);
    items = PySequence_Fast_ITEMS(arguments[0]);
    at = PyLong_AsVoidPtr(arguments[1]);
    const auto* looked = fxopt::as_tensors(arguments[0]);
    if (looked && looked->contiguous) arrays = looked->arrays.get();
    return !PyErr_Occurred();
  }
};

const c10::TensorImpl* impl_of(PyObject* item) {
  return fxopt::is_plain(item) ? fxopt::tensor_of(item).unsafeGetTensorImpl() : nullptr;
}

// nullptr for what is not simply its memory.
const c10::TensorImpl* plain(PyObject* item) {
  const c10::TensorImpl* impl = impl_of(item);
  return impl && impl->layout() == at::kStrided && !impl->is_conj() && !impl->is_neg() ? impl : nullptr;
}

// The dependent loads from list to storage, started early, are most of what this costs.
void prefetch(PyObject** items, Py_ssize_t k, Py_ssize_t n) {
  if (k + 16 < n) __builtin_prefetch(reinterpret_cast<fxopt::PythonTensor*>(items[k + 16]));
  if (k + 10 < n && fxopt::is_plain(items[k + 10])) fxopt::prefetch_metadata(fxopt::tensor_of(items[k + 10]));
  if (k + 5 < n && fxopt::is_plain(items[k + 5])) fxopt::prefetch_data_pointer(fxopt::tensor_of(items[k + 5]));
}

// One word for rows and the distance between them, -1 where it does not say everything: the rows themselves must be contiguous.
int64_t shape_word(const c10::TensorImpl* impl) {
  const auto sizes = impl->sizes(), strides = impl->strides();
  if (sizes.empty()) return int64_t(impl->itemsize()) << 32 | 1;
  int64_t inner = int64_t(impl->itemsize());
  for (size_t d = sizes.size() - 1; d >= 1; d--) {
    if (sizes[d] != 1 && strides[d] * int64_t(impl->itemsize()) != inner) return -1;
    inner *= sizes[d];
  }
  const int64_t stride = sizes[0] > 1 ? strides[0] * int64_t(impl->itemsize()) : inner;
  return sizes[0] > INT32_MAX || stride > INT32_MAX ? -1 : stride << 32 | sizes[0];
}

// The same of a contiguous tensor.
int64_t shape_word(const fxopt::Array& array) {
  int64_t row = int64_t(c10::elementSize(c10::ScalarType(array.dtype)));
  for (int32_t d = 1; d < array.dim; d++) row *= array.sizes[d];
  const int64_t rows = array.dim == 0 ? 1 : array.sizes[0];
  return rows > INT32_MAX || row > INT32_MAX ? -1 : row << 32 | rows;
}

// describe(tensors, to): two words for each tensor; -1, or the index of one that has to be made contiguous first.
PyObject* describe(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  Arguments given;
  if (!given.read(arguments, n_arguments)) return nullptr;
  auto* to = static_cast<int64_t*>(given.at);
  for (Py_ssize_t k = 0; given.arrays && k < given.count; k++) {
    const int64_t shape = shape_word(given.arrays[k]);
    if (shape < 0) return PyLong_FromSsize_t(k);
    *to++ = reinterpret_cast<int64_t>(given.arrays[k].data);
    *to++ = shape;
  }
  for (Py_ssize_t k = 0; !given.arrays && k < given.count; k++) {
    prefetch(given.items, k, given.count);
    const c10::TensorImpl* impl = plain(given.items[k]);
    const int64_t shape = impl ? shape_word(impl) : -1;
    if (shape < 0) return PyLong_FromSsize_t(k);
    *to++ = reinterpret_cast<int64_t>(impl->data());
    *to++ = shape;
  }
  return PyLong_FromLong(-1);
}

// What a graph was captured with of a tensor, whose shape somebody else compares, as two words: where it is, and how it
// lies there. A number on the CPU goes into a launch by its value.
struct Words {
  int64_t at, form;
  bool operator==(const Words& other) const { return at == other.at && form == other.form; }
};

int64_t form_of(const c10::TensorImpl* impl) {
  if (impl->dim() == 0 && impl->is_cpu() && impl->itemsize() <= sizeof(int64_t)) {
    int64_t value = 0;
    memcpy(&value, impl->data(), impl->itemsize());
    return value;
  }
  if (impl->is_contiguous()) return -1 - impl->numel();
  uint64_t form = 0;
  for (const int64_t stride : impl->strides()) form = (form ^ uint64_t(stride)) * 0x9E3779B97F4A7C15u, form ^= form >> 29;
  return int64_t(form >> 1);
}

Words words_of(const c10::TensorImpl* impl) {
  if (impl == nullptr) return {0, 0};
  return {reinterpret_cast<int64_t>(impl->data()), form_of(impl)};
}

// words(tensors, to): zeros for what is no plain tensor.
PyObject* words(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  Arguments given;
  if (!given.read(arguments, n_arguments)) return nullptr;
  for (Py_ssize_t k = 0; k < given.count; k++) static_cast<Words*>(given.at)[k] = words_of(plain(given.items[k]));
  Py_RETURN_NONE;
}

// unmoved(tensors, at): whether all still are as words() found them.
PyObject* unmoved(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  Arguments given;
  if (!given.read(arguments, n_arguments)) return nullptr;
  const auto* at = static_cast<const Words*>(given.at);
  for (Py_ssize_t k = 0; given.arrays && k < given.count; k++) {
    const fxopt::Array& array = given.arrays[k];
    const bool as_it_was = reinterpret_cast<int64_t>(array.data) == at[k].at && at[k].form < 0;
    if (!as_it_was) Py_RETURN_FALSE;
  }
  for (Py_ssize_t k = 0; !given.arrays && k < given.count; k++) {
    prefetch(given.items, k, given.count);
    const c10::TensorImpl* impl = plain(given.items[k]);
    if (!impl || !(words_of(impl) == at[k])) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// fresh(outputs, rows, batch, to): new tensors like the outputs, the first axis of k of batch * rows[k] (0: as it is), and
// two words for each of them: where it is, and its bytes.
PyObject* fresh(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  if (n_arguments != 4 || !PyList_CheckExact(arguments[0]) || !PyList_CheckExact(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "fresh: expected a list of tensors, a list of ints, an int and an address");
    return nullptr;
  }
  const int64_t batch = PyLong_AsLongLong(arguments[2]);
  auto* to = static_cast<int64_t*>(PyLong_AsVoidPtr(arguments[3]));
  if (PyErr_Occurred()) return nullptr;
  std::vector<at::Tensor> made;
  try {
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(arguments[0]); k++) {
      const at::Tensor& like = fxopt::tensor_of(PyList_GET_ITEM(arguments[0], k));
      const int64_t rows = PyLong_AsLongLong(PyList_GET_ITEM(arguments[1], k));
      c10::SmallVector<int64_t, 5> sizes(like.sizes().begin(), like.sizes().end());
      if (rows > 0) sizes[0] = batch * rows;
      made.push_back(at::empty(sizes, like.options()));
      *to++ = reinterpret_cast<int64_t>(made.back().data_ptr());
      *to++ = int64_t(made.back().nbytes());
    }
  } catch (const c10::OutOfMemoryError& error) {
    PyObject* torch = PyImport_ImportModule("torch");
    PyObject* kind = torch ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
    if (kind) PyErr_SetString(kind, error.what_without_backtrace());
    Py_XDECREF(kind);
    Py_XDECREF(torch);
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return as_list(made);
}

PyMethodDef methods[] = {
    fxopt::method("describe", describe),
    fxopt::method("words", words),
    fxopt::method("unmoved", unmoved),
    fxopt::method("fresh", fresh),
    fxopt::method("readable", fxopt::readable),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_stage_pointers", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_stage_pointers() { return PyModule_Create(&module); }
