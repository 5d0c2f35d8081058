// Addresses and shapes of a thousand Python tensors at C speed.
#include "../../torch_internals/python_tensor.h"

#include <cstdint>
#include <cstring>

namespace {

PyObject** items_of(PyObject* sequence, Py_ssize_t& count) {
  if (!PyList_CheckExact(sequence) && !PyTuple_CheckExact(sequence)) {
    PyErr_SetString(PyExc_TypeError, "expected a list or a tuple of tensors");
    return nullptr;
  }
  count = PySequence_Fast_GET_SIZE(sequence);
  return PySequence_Fast_ITEMS(sequence);
}

const c10::TensorImpl* plain(PyObject* item) {
  if (!fxopt::is_plain(item)) return nullptr;
  const c10::TensorImpl* impl = fxopt::tensor_of(item).unsafeGetTensorImpl();
  const bool lazy = impl->is_conj() || impl->is_neg();
  return impl->layout() == at::kStrided && !lazy ? impl : nullptr;
}

// The dependent loads from list to storage, started early, are most of what this costs.
void prefetch(PyObject** items, Py_ssize_t k, Py_ssize_t n) {
  if (k + 16 < n) __builtin_prefetch(reinterpret_cast<fxopt::PythonTensor*>(items[k + 16]));
  if (k + 10 < n) {
    if (const c10::TensorImpl* impl = plain(items[k + 10])) {
      const char* line = reinterpret_cast<const char*>(impl);
      for (size_t at = 0; at < sizeof(c10::TensorImpl); at += 64) __builtin_prefetch(line + at);
    }
  }
  if (k + 5 < n) {
    if (const c10::TensorImpl* impl = plain(items[k + 5])) __builtin_prefetch(impl->unsafe_storage().unsafeGetStorageImpl());
  }
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

// describe(tensors, first, to): two words for each tensor from `first` on; -1, or the index of one that has to be made
// contiguous first.
PyObject* describe(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  Py_ssize_t count;
  PyObject** items = n_arguments == 3 ? items_of(arguments[0], count) : nullptr;
  if (!items) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "describe(tensors, first, to)");
  const Py_ssize_t first = PyLong_AsSsize_t(arguments[1]);
  auto* to = static_cast<int64_t*>(PyLong_AsVoidPtr(arguments[2]));
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t k = first; k < count; k++) {
    prefetch(items, k, count);
    const c10::TensorImpl* impl = plain(items[k]);
    const int64_t shape = impl ? shape_word(impl) : -1;
    if (shape < 0) return PyLong_FromSsize_t(k);
    *to++ = reinterpret_cast<int64_t>(impl->data());
    *to++ = shape;
  }
  return PyLong_FromLong(-1);
}

// What a graph was captured with of a tensor, as two words: where it is, and how it lies there. A number on the CPU goes
// into a launch by its value.
struct Words {
  int64_t at, form;
  bool operator==(const Words& other) const { return at == other.at && form == other.form; }
};

Words words_of(const c10::TensorImpl* impl) {
  if (impl == nullptr) return {0, 0};
  uint64_t form = 0xCBF29CE484222325u;
  const auto mix = [&](uint64_t word) { form = (form ^ word) * 0x9E3779B97F4A7C15u, form ^= form >> 29; };
  for (const int64_t size : impl->sizes()) mix(uint64_t(size));
  for (const int64_t stride : impl->strides()) mix(uint64_t(stride));
  if (impl->dim() == 0 && impl->is_cpu() && impl->itemsize() <= sizeof(uint64_t)) {
    uint64_t value = 0;
    memcpy(&value, impl->data(), impl->itemsize());
    mix(value);
  }
  return {reinterpret_cast<int64_t>(impl->data()), int64_t(form)};
}

// words(tensors, count, to): those of the first `count` tensors, zeros for what is no plain tensor.
PyObject* words(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  Py_ssize_t count;
  PyObject** items = n_arguments == 3 ? items_of(arguments[0], count) : nullptr;
  if (!items) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "words(tensors, count, to)");
  const Py_ssize_t wanted = PyLong_AsSsize_t(arguments[1]);
  auto* to = static_cast<Words*>(PyLong_AsVoidPtr(arguments[2]));
  if (PyErr_Occurred()) return nullptr;
  if (wanted > count) return PyErr_Format(PyExc_ValueError, "words: fewer tensors than asked for");
  for (Py_ssize_t k = 0; k < wanted; k++) {
    prefetch(items, k, wanted);
    to[k] = words_of(plain(items[k]));
  }
  Py_RETURN_NONE;
}

// unmoved(tensors, count, at): whether the first `count` tensors still are as words() found them.
PyObject* unmoved(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  Py_ssize_t count;
  PyObject** items = n_arguments == 3 ? items_of(arguments[0], count) : nullptr;
  if (!items) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "unmoved(tensors, count, at)");
  const Py_ssize_t wanted = PyLong_AsSsize_t(arguments[1]);
  const auto* at = static_cast<const Words*>(PyLong_AsVoidPtr(arguments[2]));
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t k = 0; k < wanted; k++) {
    prefetch(items, k, wanted);
    const c10::TensorImpl* impl = k < count ? plain(items[k]) : nullptr;
    if (!impl || !(words_of(impl) == at[k])) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

template <class F>
PyCFunction fast(F* function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)); }

PyMethodDef methods[] = {
    {"describe", fast(&describe), METH_FASTCALL, nullptr},
    {"words", fast(&words), METH_FASTCALL, nullptr},
    {"unmoved", fast(&unmoved), METH_FASTCALL, nullptr},
    {"readable", fast(&fxopt::readable), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_stage_pointers", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_stage_pointers() { return PyModule_Create(&module); }
