// Whether tensors have the forms that a capture expects, and where they lie.
#pragma once
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "../kernels/operand.h"

namespace {

// Thousands of tensors and dicts do not stay in the cache between calls: fetch them in steps, ahead of their use. A cold call
// of 1000 columns takes 375-385 us with 16 and 8, and 311-369 so.
constexpr Py_ssize_t kFar = 64, kNear = 32;
constexpr Py_ssize_t kMany = 64;  // fewer tensors are read by their operator, not ahead of it

PyTypeObject* tensors_type;

fxopt::Tensors* new_tensors(Py_ssize_t n) {
  PyObject* self = tensors_type->tp_alloc(tensors_type, 0);
  if (self == nullptr) {
    return nullptr;
  }
  new (&reinterpret_cast<fxopt::Tensors*>(self)->arrays) std::unique_ptr<fxopt::Array[]>;
  auto* list = reinterpret_cast<PyListObject*>(self);
  list->ob_item = static_cast<PyObject**>(PyMem_Calloc(size_t(n) + 1, sizeof(PyObject*)));
  if (list->ob_item == nullptr) {
    Py_DECREF(self);
    PyErr_NoMemory();
    return nullptr;
  }
  list->allocated = n + 1;
  Py_SET_SIZE(list, n);
  return reinterpret_cast<fxopt::Tensors*>(self);
}

void tensors_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<fxopt::Tensors*>(self)->arrays.~unique_ptr();
  PyList_Type.tp_dealloc(self);
  Py_DECREF(type);
}

PyType_Slot tensors_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(tensors_dealloc)},
    {0, nullptr},
};
PyType_Spec tensors_spec = {fxopt::kTensors, sizeof(fxopt::Tensors), 0, Py_TPFLAGS_DEFAULT, tensors_slots};

struct Form {
  at::ScalarType dtype;
  c10::Device device;
  uint32_t begin;  // its dims in Forms::dims
  uint32_t ndim;
};

// Where tensors lie; no arrays: too few to ask, or they are not plain ones of one device.
struct Looked {
  std::unique_ptr<fxopt::Array[]> arrays;
  fxopt::Place place;
  c10::Device device = at::kCPU;
  bool contiguous = true;  // on CUDA; nobody asks on the CPU

  Looked(PyObject* const* tensors, Py_ssize_t n) {
    if (n < kMany || !fxopt::is_plain(tensors[0])) return;
    arrays.reset(new (std::nothrow) fxopt::Array[size_t(n)]);
    place = fxopt::Place::of(fxopt::tensor_of(tensors[0]));
    device = fxopt::tensor_of(tensors[0]).device();
  }

  // Null where it does not lie so: then no arrays are left.
  const fxopt::Array* read(PyObject* tensor, Py_ssize_t i) {
    fxopt::Array* array = &arrays[size_t(i)];
    if (!fxopt::read(tensor, place, *array) || array->is_none()) {
      arrays.reset();
      return nullptr;
    }
    if (place.device >= 0) contiguous = contiguous && fxopt::tensor_of(tensor).is_contiguous();
    return array;
  }
};

// dims: a size, or -1 - symbol.
struct Forms {
  std::vector<Form> forms;
  std::vector<int64_t> dims;
  size_t symbols = 0;

  bool hold(PyObject* const* tensors, Py_ssize_t n, std::vector<int64_t>& sizes, Looked* looked) const {
    for (Py_ssize_t i = 0; i < n; ++i) {
      const bool looks = looked && looked->arrays;
      if (i + 2 * kFar < n) __builtin_prefetch(tensors[i + 2 * kFar]);
      if (i + kFar < n && fxopt::is_plain(tensors[i + kFar])) fxopt::prefetch_metadata(fxopt::tensor_of(tensors[i + kFar]));
      if (looks && i + kNear < n && fxopt::is_plain(tensors[i + kNear])) fxopt::prefetch_data_pointer(fxopt::tensor_of(tensors[i + kNear]));
      const fxopt::Array* array = looks ? looked->read(tensors[i], i) : nullptr;
      if (!(array ? holds(forms[i], *array, looked->device, sizes) : holds(forms[i], tensors[i], sizes))) {
        return false;
      }
    }
    return true;
  }

  bool holds(const Form& form, const fxopt::Array& array, c10::Device device, std::vector<int64_t>& sizes) const {
    return array.dtype == int32_t(form.dtype) && form.device == device && holds(form, {array.sizes, size_t(array.dim)}, sizes);
  }

  bool holds(const Form& form, PyObject* object, std::vector<int64_t>& sizes) const {
    if (!fxopt::is_plain(object)) {
      return false;
    }
    const at::Tensor& tensor = fxopt::tensor_of(object);
    return tensor.scalar_type() == form.dtype && tensor.layout() == at::kStrided && tensor.device() == form.device &&
           holds(form, tensor.sizes(), sizes);
  }

  bool holds(const Form& form, at::IntArrayRef shape, std::vector<int64_t>& sizes) const {
    if (shape.size() != form.ndim) {
      return false;
    }
    for (uint32_t d = 0; d < form.ndim; ++d) {
      const int64_t expected = dims[form.begin + d];
      if (expected >= 0) {
        if (shape[d] != expected) {
          return false;
        }
        continue;
      }
      int64_t& known = sizes[-1 - expected];
      if (known < 0) {
        known = shape[d];
      } else if (known != shape[d]) {
        return false;
      }
    }
    return true;
  }
};

// Which of the tensors are one object: firsts[i] is the place of the first one that tensor i is. Empty: nobody asked.
struct Identities {
  std::vector<uint32_t> firsts;

  bool hold(PyObject* const* tensors) const {
    const size_t n = firsts.size();
    if (n <= kFew) {
      for (size_t i = 1; i < n; ++i) {
        for (size_t j = 0; j < i; ++j) {
          if ((tensors[i] == tensors[j]) != (firsts[i] == firsts[j])) return false;
        }
      }
      return true;
    }
    size_t slots = 1;
    while (slots < 2 * n) slots *= 2;
    std::vector<PyObject*> seen(slots, nullptr);
    for (size_t i = 0; i < n; ++i) {
      if (firsts[i] != i) {
        if (tensors[i] != tensors[firsts[i]]) return false;
        continue;
      }
      size_t slot = (reinterpret_cast<uintptr_t>(tensors[i]) * 0x9E3779B97F4A7C15u >> 32) & (slots - 1);
      for (; seen[slot] != nullptr; slot = (slot + 1) & (slots - 1)) {
        if (seen[slot] == tensors[i]) return false;
      }
      seen[slot] = tensors[i];
    }
    return true;
  }

  static constexpr size_t kFew = 12;
};

struct TensorCheck {
  PyObject_HEAD
  Forms* forms;
  Identities* identities;
};

void check_dealloc(PyObject* self) {
  delete reinterpret_cast<TensorCheck*>(self)->forms;
  delete reinterpret_cast<TensorCheck*>(self)->identities;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// TensorCheck(like, dims, symbols, firsts=[]): like[i] is an empty tensor of the dtype and device, dims[i] a list of ints.
PyObject* check_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *like, *dims, *firsts = nullptr;
  Py_ssize_t symbols;
  if (!PyArg_ParseTuple(args, "O!O!n|O!", &PyList_Type, &like, &PyList_Type, &dims, &symbols, &PyList_Type, &firsts)) {
    return nullptr;
  }
  auto forms = std::make_unique<Forms>();
  forms->symbols = static_cast<size_t>(symbols);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(like); ++i) {
    PyObject* item = PyList_GET_ITEM(like, i);
    PyObject* shape = i < PyList_GET_SIZE(dims) ? PyList_GET_ITEM(dims, i) : nullptr;
    if (!fxopt::is_plain(item) || shape == nullptr || !PyList_Check(shape)) {
      PyErr_SetString(PyExc_TypeError, "TensorCheck: expected a list of tensors and a list of lists of ints");
      return nullptr;
    }
    const at::Tensor& tensor = fxopt::tensor_of(item);
    const auto begin = static_cast<uint32_t>(forms->dims.size());
    for (Py_ssize_t d = 0; d < PyList_GET_SIZE(shape); ++d) {
      const int64_t dim = PyLong_AsLongLong(PyList_GET_ITEM(shape, d));
      if (dim == -1 && PyErr_Occurred()) {
        return nullptr;
      }
      if (dim < -symbols) {
        PyErr_SetString(PyExc_ValueError, "TensorCheck: a dim names a symbol beyond `symbols`");
        return nullptr;
      }
      forms->dims.push_back(dim);
    }
    const auto ndim = static_cast<uint32_t>(PyList_GET_SIZE(shape));
    forms->forms.push_back(Form{tensor.scalar_type(), tensor.device(), begin, ndim});
  }
  auto identities = std::make_unique<Identities>();
  for (Py_ssize_t i = 0; firsts != nullptr && i < PyList_GET_SIZE(firsts); ++i) {
    const Py_ssize_t first = PyLong_AsSsize_t(PyList_GET_ITEM(firsts, i));
    if (first < 0 || first > i || PyList_GET_SIZE(firsts) != PyList_GET_SIZE(like)) {
      PyErr_SetString(PyExc_ValueError, "TensorCheck: expected a place at or before each tensor's own");
      return nullptr;
    }
    identities->firsts.push_back(static_cast<uint32_t>(first));
  }
  auto* self = reinterpret_cast<TensorCheck*>(type->tp_alloc(type, 0));
  if (self != nullptr) {
    self->forms = forms.release();
    self->identities = identities.release();
  }
  return reinterpret_cast<PyObject*>(self);
}

// Whether these are a list or a tuple; else an error is set.
bool is_sequence(PyObject* tensors) {
  if (PyList_Check(tensors) || PyTuple_Check(tensors)) return true;
  PyErr_SetString(PyExc_TypeError, "TensorCheck: expected a list or a tuple");
  return false;
}

// Whether the tensors are of the forms. looked: learns where they lie, if that is asked for.
bool check(PyObject* self, PyObject* tensors, Looked* looked) {
  const Forms& forms = *reinterpret_cast<TensorCheck*>(self)->forms;
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(tensors);
  PyObject* const* items = PySequence_Fast_ITEMS(tensors);
  try {
    std::vector<int64_t> sizes(forms.symbols, -1);
    return n == static_cast<Py_ssize_t>(forms.forms.size()) && forms.hold(items, n, sizes, looked) &&
           reinterpret_cast<TensorCheck*>(self)->identities->hold(items);
  } catch (const std::exception&) {  // sizes that are symbols, or a tensor type without sizes: not one of ours
    return false;
  }
}

PyObject* check_call(PyObject* self, PyObject* args, PyObject*) {
  PyObject* tensors;
  if (!PyArg_ParseTuple(args, "O", &tensors) || !is_sequence(tensors)) {
    return nullptr;
  }
  return PyBool_FromLong(check(self, tensors, nullptr));
}

// check.look(tensors) -> them, many of them as fxopt.Tensors, or None when they are not of the forms.
PyObject* check_look(PyObject* self, PyObject* tensors) {
  if (!is_sequence(tensors)) {
    return nullptr;
  }
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(tensors);
  Looked looked(PySequence_Fast_ITEMS(tensors), n);
  if (!check(self, tensors, &looked)) {
    Py_RETURN_NONE;
  }
  fxopt::Tensors* list = fxopt::as_tensors(tensors);
  if (list == nullptr && !looked.arrays) {
    return Py_NewRef(tensors);
  }
  if (list != nullptr) {
    Py_INCREF(tensors);
  } else {
    list = new_tensors(n);
    for (Py_ssize_t i = 0; list != nullptr && i < n; ++i) {
      list->list.ob_item[i] = Py_NewRef(PySequence_Fast_GET_ITEM(tensors, i));
    }
  }
  if (list != nullptr) {
    list->arrays = std::move(looked.arrays);
    list->place = looked.place;
    list->contiguous = looked.contiguous;
  }
  return reinterpret_cast<PyObject*>(list);
}

PyMethodDef check_methods[] = {{"look", check_look, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot check_slots[] = {
    {Py_tp_methods, check_methods},
    {Py_tp_new, reinterpret_cast<void*>(check_new)},
    {Py_tp_call, reinterpret_cast<void*>(check_call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(check_dealloc)},
    {0, nullptr},
};
PyType_Spec check_spec = {"fxopt_signature.TensorCheck", sizeof(TensorCheck), 0, Py_TPFLAGS_DEFAULT, check_slots};

}  // namespace
