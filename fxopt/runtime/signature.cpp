// The per-call checks of a signature at C speed: dict reads and tensor metadata, without a Python object for either.
// signature.py and watch.py hold the same functions in Python; a test compares them.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "../kernels/operand.h"

namespace {

// ---- dicts: wheres[i][keys[i]] for all i ----------------------------------------------------------------------

// A thousand small dicts do not stay in the cache between calls: fetch them in two steps, ahead of their use. A cold call
// of 1000 columns takes 375-385 us with 16 and 8, and 311-369 so.
constexpr Py_ssize_t kFar = 64, kNear = 32;
constexpr Py_ssize_t kMany = 64;  // fewer tensors are read by their operator, not ahead of it

void prefetch(PyObject* wheres, Py_ssize_t i, Py_ssize_t n) {
  if (i + kFar < n) {
    __builtin_prefetch(PyList_GET_ITEM(wheres, i + kFar));
    __builtin_prefetch(&reinterpret_cast<PyDictObject*>(PyList_GET_ITEM(wheres, i + kFar))->ma_values);
  }
  if (i + kNear < n && PyDict_CheckExact(PyList_GET_ITEM(wheres, i + kNear))) {
    const auto* dict = reinterpret_cast<PyDictObject*>(PyList_GET_ITEM(wheres, i + kNear));
    const auto* keys = reinterpret_cast<const char*>(dict->ma_keys);
    __builtin_prefetch(dict->ma_values ? reinterpret_cast<const char*>(dict->ma_values) : keys + 64);
    __builtin_prefetch(keys);
  }
}

// A reference that goes with its scope.
struct Held {
  PyObject* object = nullptr;
  ~Held() { Py_XDECREF(object); }
};

// What vars(class) gives, as CPython lays it out; through its own methods a read takes 30 ns instead of 5.
struct ClassView {
  PyObject_HEAD
  PyObject* attributes;
};

PyObject* behind_view(PyObject* where) {
  return Py_IS_TYPE(where, &PyDictProxy_Type) ? reinterpret_cast<ClassView*>(where)->attributes : where;
}

// __code__, __defaults__ or __kwdefaults__ of a function, borrowed.
PyObject* of_function(PyObject* function, PyObject* key) {
  const char of_what = PyUnicode_READ_CHAR(key, 2);
  PyObject* found = of_what == 'c'   ? PyFunction_GET_CODE(function)
                    : of_what == 'd' ? PyFunction_GET_DEFAULTS(function)
                                     : PyFunction_GET_KW_DEFAULTS(function);
  return found ? found : Py_None;
}

// Borrowed, or nullptr when absent. `where` may also be a function, a cell, a list or an object of Python; `hold` keeps
// its result alive.
PyObject* lookup(PyObject* where, PyObject* key, Held& hold) {
  where = behind_view(where);
  if (PyDict_Check(where)) {
    return PyDict_GetItemWithError(where, key);
  }
  if (PyCell_Check(where)) {
    PyObject* content = PyCell_GET(where);
    return content ? content : Py_None;
  }
  if (PyList_CheckExact(where) && PyLong_CheckExact(key)) {
    const Py_ssize_t at = PyLong_AsSsize_t(key);
    if (at >= 0 && at < PyList_GET_SIZE(where)) {
      return PyList_GET_ITEM(where, at);
    }
  }
  if (PyFunction_Check(where)) {
    return of_function(where, key);
  }
  hold.object = PyObject_GetItem(where, key);
  return hold.object;
}

// The number of a dict's last change (PEP 509), which no other dict ever had; 0 where Python does not number them (from
// 3.13 on), or `where` is no dict.
uint64_t version_of(PyObject* where) {
#if PY_VERSION_HEX < 0x030D0000
  where = behind_view(where);
  if (PyDict_CheckExact(where) || PyODict_CheckExact(where)) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return reinterpret_cast<PyDictObject*>(where)->ma_version_tag;
#pragma GCC diagnostic pop
  }
#endif
  return 0;
}

// The number of the newest change of any of the dicts. Numbers only grow, so that each change gives another one. 0 where
// one of them has none.
uint64_t newest_of(PyObject* dicts) {
  const Py_ssize_t n = PyList_GET_SIZE(dicts);
  uint64_t newest = 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (i + kFar < n) __builtin_prefetch(&reinterpret_cast<PyDictObject*>(PyList_GET_ITEM(dicts, i + kFar))->ma_used);
    const uint64_t version = version_of(PyList_GET_ITEM(dicts, i));
    if (version == 0) return 0;
    newest = std::max(newest, version);
  }
  return newest;
}

// What an earlier call read. It keeps nothing alive: the values are there as long as their dicts have no newer change.
struct Seen {
  PyObject_HEAD
  std::vector<PyObject*>* values;
  uint64_t newest;
};

PyObject* seen_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Seen*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->values = new std::vector<PyObject*>;
  return reinterpret_cast<PyObject*>(self);
}

void seen_dealloc(PyObject* self) {
  delete reinterpret_cast<Seen*>(self)->values;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* seen_type;

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

// Whether these are `count` lists of one length; else an error is set.
bool are_lists(const char* name, PyObject* const* lists, Py_ssize_t given, Py_ssize_t count) {
  bool lists_only = given == count, one_length = true;
  for (Py_ssize_t i = 0; lists_only && i < count; ++i) {
    lists_only = PyList_Check(lists[i]);
    one_length &= lists_only && PyList_GET_SIZE(lists[i]) == PyList_GET_SIZE(lists[0]);
  }
  if (!lists_only || !one_length) {
    PyErr_Format(lists_only ? PyExc_ValueError : PyExc_TypeError, "%s: expected %zd lists of one length", name, count);
    return false;
  }
  return true;
}

// read(seen, wheres, keys) -> list (fxopt.Tensors), or None when a key is absent.
PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (given == 0 || !Py_IS_TYPE(args[0], seen_type)) {
    PyErr_SetString(PyExc_TypeError, "read: expected a Seen and two lists");
    return nullptr;
  }
  if (!are_lists("read", args + 1, given - 1, 2)) {
    return nullptr;
  }
  auto& seen = *reinterpret_cast<Seen*>(args[0]);
  PyObject *wheres = args[1], *keys = args[2];
  const Py_ssize_t n = PyList_GET_SIZE(wheres);
  auto* values = reinterpret_cast<PyObject*>(new_tensors(n));
  if (values == nullptr) {
    return nullptr;
  }
  const uint64_t newest = newest_of(wheres);
  const bool known = newest != 0 && newest == seen.newest && seen.values->size() == size_t(n);
  seen.newest = 0;  // until all of them are read
  seen.values->resize(size_t(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject*& value = (*seen.values)[size_t(i)];
    Held hold;
    if (known) {
      if (i + kFar < n) __builtin_prefetch((*seen.values)[size_t(i + kFar)]);
    } else {
      prefetch(wheres, i, n);
      value = lookup(PyList_GET_ITEM(wheres, i), PyList_GET_ITEM(keys, i), hold);
    }
    if (value == nullptr) {
      Py_DECREF(values);
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_LookupError)) {
        return nullptr;
      }
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    Py_INCREF(value);
    PyList_SET_ITEM(values, i, value);
  }
  seen.newest = newest;
  return values;
}

// unchanged(wheres, keys, values) -> bool: every value is still the same object.
PyObject* unchanged(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!are_lists("unchanged", args, given, 3)) {
    return nullptr;
  }
  PyObject *wheres = args[0], *keys = args[1], *values = args[2];
  const Py_ssize_t n = PyList_GET_SIZE(wheres);
  for (Py_ssize_t i = 0; i < n; ++i) {
    prefetch(wheres, i, n);
    Held hold;
    PyObject* value = lookup(PyList_GET_ITEM(wheres, i), PyList_GET_ITEM(keys, i), hold);
    if (value != PyList_GET_ITEM(values, i)) {
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_LookupError)) {
        return nullptr;
      }
      PyErr_Clear();
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// generation(dicts) -> int, another one once a dict or the dict behind a view changed in any way; None where one of them
// has no number.
PyObject* generation(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!are_lists("generation", args, given, 1)) {
    return nullptr;
  }
  const uint64_t newest = newest_of(args[0]);
  if (newest == 0 && PyList_GET_SIZE(args[0]) != 0) {
    Py_RETURN_NONE;
  }
  return PyLong_FromUnsignedLongLong(newest);
}

// lengths(values, expected) -> bool: every dict, list or set still has as many entries as expected, and every object the
// type that is expected of it.
PyObject* lengths(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!are_lists("lengths", args, given, 2)) {
    return nullptr;
  }
  PyObject *values = args[0], *expected = args[1];
  const Py_ssize_t n = PyList_GET_SIZE(values);
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (i + kFar < n) {
      __builtin_prefetch(PyList_GET_ITEM(values, i + kFar));
    }
    PyObject *value = behind_view(PyList_GET_ITEM(values, i)), *wanted = PyList_GET_ITEM(expected, i);
    if (PyType_Check(wanted)) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != wanted) {
        Py_RETURN_FALSE;
      }
      continue;
    }
    const Py_ssize_t length = PyDict_Check(value) ? PyDict_Size(value) : PyObject_Size(value);
    if (length < 0) {
      return nullptr;
    }
    if (length != PyLong_AsSsize_t(wanted)) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// ---- tensors ----------------------------------------------------------------------------------------------------

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
    arrays.reset(new fxopt::Array[size_t(n)]);
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
  if (!looked.arrays) {
    return Py_NewRef(tensors);
  }
  fxopt::Tensors* list = fxopt::as_tensors(tensors);
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

// ---- memory -----------------------------------------------------------------------------------------------------

struct Span {
  const char* begin;
  const char* end;
  long group;
};

// apart(tensors, groups) -> bool: no tensor overlaps memory of another group. groups[i] < 0: not edited, in no group.
PyObject* apart(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!are_lists("apart", args, given, 2)) {
    return nullptr;
  }
  PyObject *tensors = args[0], *groups = args[1];
  const Py_ssize_t n = PyList_GET_SIZE(tensors);
  std::vector<Span> edited, others;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PyList_GET_ITEM(tensors, i);
    if (!fxopt::is_plain(item)) Py_RETURN_FALSE;
    const at::Tensor& tensor = fxopt::tensor_of(item);
    if (!tensor.has_storage()) Py_RETURN_FALSE;
    const auto* begin = static_cast<const char*>(tensor.storage().data());
    const size_t size = tensor.storage().nbytes();
    const long group = PyLong_AsLong(PyList_GET_ITEM(groups, i));
    if (begin != nullptr && size > 0) (group < 0 ? others : edited).push_back(Span{begin, begin + size, group});
  }
  std::sort(edited.begin(), edited.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<Span> pieces;
  for (const Span& span : edited) {
    if (pieces.empty() || pieces.back().end <= span.begin) {
      pieces.push_back(span);
    } else if (pieces.back().group != span.group) {
      Py_RETURN_FALSE;
    } else {
      pieces.back().end = std::max(pieces.back().end, span.end);
    }
  }
  for (const Span& span : others) {
    auto after = std::lower_bound(pieces.begin(), pieces.end(), span.end,
                                  [](const Span& piece, const char* end) { return piece.begin < end; });
    if (after != pieces.begin() && (after - 1)->end > span.begin) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
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

PyType_Slot seen_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(seen_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(seen_dealloc)},
    {0, nullptr},
};
PyType_Spec seen_spec = {"fxopt_signature.Seen", sizeof(Seen), 0, Py_TPFLAGS_DEFAULT, seen_slots};

PyType_Slot tensors_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(tensors_dealloc)},
    {0, nullptr},
};
PyType_Spec tensors_spec = {fxopt::kTensors, sizeof(fxopt::Tensors), 0, Py_TPFLAGS_DEFAULT, tensors_slots};

PyMethodDef functions[] = {
    fxopt::method("read", read),
    fxopt::method("unchanged", unchanged),
    fxopt::method("generation", generation),
    fxopt::method("lengths", lengths),
    fxopt::method("apart", apart),
    fxopt::method("readable", fxopt::readable),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fxopt_signature", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_signature() {
  PyObject* module = PyModule_Create(&definition);
  PyObject* check = PyType_FromSpec(&check_spec);
  PyObject* seen = PyType_FromSpec(&seen_spec);
  if (module == nullptr || PyModule_AddObject(module, "TensorCheck", check) < 0 || PyModule_AddObject(module, "Seen", seen) < 0) {
    return nullptr;
  }
  seen_type = reinterpret_cast<PyTypeObject*>(seen);
  PyObject* bases = PyTuple_Pack(1, &PyList_Type);
  tensors_type = bases ? reinterpret_cast<PyTypeObject*>(PyType_FromSpecWithBases(&tensors_spec, bases)) : nullptr;
  Py_XDECREF(bases);
  if (tensors_type == nullptr) {
    return nullptr;
  }
  return module;
}
