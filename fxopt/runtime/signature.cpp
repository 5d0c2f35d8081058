// The per-call checks of a signature at C speed: dict reads and tensor metadata, without a Python object for either.
// signature.py and watch.py hold the same functions in Python; a test compares them.

#include <algorithm>
#include <vector>

#include "tensor_check.h"

namespace {

// ---- dicts: wheres[i][keys[i]] for all i ----------------------------------------------------------------------

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
  if (PyList_Check(where) && PyLong_CheckExact(key)) {
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

// The answer where a lookup found nothing; nullptr where it raised another error than that.
PyObject* unless_raised(PyObject* answer) {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_LookupError)) {
    return nullptr;
  }
  PyErr_Clear();
  return Py_NewRef(answer);
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
      return unless_raised(Py_None);
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
      return unless_raised(Py_False);
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

PyType_Slot seen_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(seen_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(seen_dealloc)},
    {0, nullptr},
};
PyType_Spec seen_spec = {"fxopt_signature.Seen", sizeof(Seen), 0, Py_TPFLAGS_DEFAULT, seen_slots};

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
