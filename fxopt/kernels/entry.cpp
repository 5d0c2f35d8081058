// Python's own way into the kernels, past the dispatcher: boxing 2000 tensors costs that about 650 us, this 20. It takes
// plain CPU tensors, or plain tensors of one CUDA device, with nothing to record, reads them where they are and calls the
// kernel. For everything else it answers None.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "entry.h"
#include "../torch_internals/python_call.h"

namespace {

// An operator's kernels, null where there is none. On CUDA: how many of the allocated tensors are outputs, the others
// being scratch; or -1, and `text` (256 bytes) says what is wrong.
struct Ways {
  void (*cpu)(const fxopt::Request*) = nullptr;
  int64_t (*cuda[fxopt::kMostDevices])(const fxopt::Request*, int device, char* text) = {};
};

const uint64_t kPlainCuda = c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
                                                 c10::DispatchKey::ADInplaceOrView}).raw_repr();

// Where the tensors of a call must be. device -1: the CPU.
struct Place {
  bool grad_mode;
  uint64_t keys = kPlain;
  int device = -1;

  bool holds(const c10::TensorImpl* impl) const {
    return (impl->key_set().raw_repr() & ~keys) == 0 && impl->unsafe_storage() && !(grad_mode && impl->requires_grad()) &&
           impl->numel() <= fxopt::kMostElements && (device < 0 || impl->device().index() == device);
  }
};

bool is_sequence(PyObject* argument) { return PyList_CheckExact(argument) || PyTuple_CheckExact(argument); }

// A CUDA tensor in front says that all are expected on its device.
Place place_of(PyObject* first, const Ways& ways) {
  Place place{c10::GradMode::is_enabled()};
  if (is_sequence(first)) {
    if (PySequence_Fast_GET_SIZE(first) == 0) return place;
    first = PySequence_Fast_ITEMS(first)[0];
  }
  if (!fxopt::is_plain(first) || !fxopt::tensor_of(first).is_cuda()) return place;
  const int device = fxopt::tensor_of(first).device().index();
  if (!ways.cuda[device]) return place;
  place.keys = kPlainCuda;
  place.device = device;
  return place;
}

// `impl->data()` of a tensor with storage, without asking a virtual function for that.
char* data_of(const c10::TensorImpl* impl) {
  if (impl->numel() == 0) return nullptr;
  const auto* data = static_cast<const char*>(impl->unsafe_storage().data());
  return const_cast<char*>(data) + impl->dtype().itemsize() * size_t(impl->storage_offset());
}

inline bool read(PyObject* item, const Place& place, fxopt::Array& operand) {
  if (item == Py_None && place.device < 0) {
    operand = {nullptr, nullptr, nullptr, -1, 0};
    return true;
  }
  if (!fxopt::is_plain(item)) return false;
  const c10::TensorImpl* impl = fxopt::tensor_of(item).unsafeGetTensorImpl();
  if (!place.holds(impl)) return false;
  const auto sizes = impl->sizes();
  operand = {data_of(impl), sizes.data(), impl->strides().data(), int32_t(sizes.size()), int32_t(c10::typeMetaToScalarType(impl->dtype()))};
  return true;
}

// The dependent loads from list to storage, started early: they are most of what unpacking 2000 tensors costs. A cold call
// of 1000 columns takes 550 us with half these distances, and 524 so.
void prefetch(PyObject** items, Py_ssize_t k, Py_ssize_t n, const Place& place) {
  if (k + 48 < n) __builtin_prefetch(reinterpret_cast<fxopt::PythonTensor*>(items[k + 48]));
  if (k + 32 < n && fxopt::is_plain(items[k + 32])) fxopt::prefetch_metadata(fxopt::tensor_of(items[k + 32]));
  if (k + 16 < n && fxopt::is_plain(items[k + 16])) {
    const at::Tensor& tensor = fxopt::tensor_of(items[k + 16]);
    if ((tensor.key_set().raw_repr() & ~place.keys) == 0) fxopt::prefetch_data_pointer(tensor);
  }
}

// The operands of the calls of a thread; what one call wrote stays there, as clearing it takes as long as writing.
struct Operands {
  std::vector<fxopt::Array> arrays;
  size_t n = 0;

  fxopt::Array* next(size_t count) {
    if (arrays.size() < n + count) arrays.resize(n + count);
    return arrays.data() + std::exchange(n, n + count);
  }

  bool append(PyObject* argument, const Place& place) {
    if (!is_sequence(argument)) return read(argument, place, *next(1));
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(argument);
    PyObject** items = PySequence_Fast_ITEMS(argument);
    fxopt::Array* to = next(size_t(count));
    for (Py_ssize_t k = 0; k < count; k++) {
      prefetch(items, k, count, place);
      if (!read(items[k], place, to[k])) return false;
    }
    return true;
  }
};

struct Results {
  int device;
  std::vector<at::Tensor> tensors;
};

char* allocate(void* context, int32_t dim, const int64_t* sizes, int32_t dtype) {
  auto& results = *static_cast<Results*>(context);
  auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype));
  if (results.device >= 0) options = options.device(at::Device(at::kCUDA, c10::DeviceIndex(results.device)));
  results.tensors.push_back(at::empty(at::IntArrayRef(sizes, size_t(dim)), options));
  return static_cast<char*>(results.tensors.back().mutable_data_ptr());
}

// The kernel on arguments that are a tensor, None, or a list of those, and last the plan, an int64 tensor on the CPU.
// Returns its outputs, or None: use the dispatcher. The caller's lists must not change meanwhile, since the GIL is
// released and they alone keep the tensors alive.
PyObject* call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t n_arguments) {
  const Ways& ways = *static_cast<Ways*>(PyCapsule_GetPointer(capsule, nullptr));
  thread_local Operands operands;
  thread_local std::vector<int64_t> counts;
  operands.n = 0;
  counts.clear();
  if (n_arguments == 0 || !undisturbed()) Py_RETURN_NONE;
  const Place place = place_of(arguments[0], ways);
  for (Py_ssize_t k = 0; k + 1 < n_arguments; k++) {
    const size_t before = operands.n;
    if (!operands.append(arguments[k], place)) Py_RETURN_NONE;
    counts.push_back(int64_t(operands.n - before));
  }
  fxopt::Array plan;
  if (!read(arguments[n_arguments - 1], Place{place.grad_mode}, plan)) Py_RETURN_NONE;
  if (plan.dtype != fxopt::kDtypeInt64 || plan.dim != 1 || plan.strides[0] != 1) Py_RETURN_NONE;
  Results results{place.device, {}};
  const fxopt::Request request{operands.arrays.data(), counts.data(), int64_t(operands.n), int64_t(counts.size()),
                               reinterpret_cast<const int64_t*>(plan.data), plan.sizes[0], allocate, &results};
  const bool ran = ran_without_gil([&] {
    if (place.device < 0) return ways.cpu(&request);
    char text[256];
    const int64_t outputs = ways.cuda[place.device](&request, place.device, text);
    if (outputs < 0) throw std::runtime_error(text);
    results.tensors.resize(size_t(outputs));
  });
  return ran ? as_list(results.tensors) : nullptr;
}

PyMethodDef called = fxopt::method("call", call);

// bind(address of a kernel's `void run(const Request*)`) -> a function, which lives as long as the process
PyObject* bind(PyObject*, PyObject* address) {
  auto* ways = new Ways;
  ways->cpu = reinterpret_cast<decltype(Ways::cpu)>(PyLong_AsVoidPtr(address));
  return PyErr_Occurred() ? nullptr : PyCFunction_New(&called, PyCapsule_New(ways, nullptr, nullptr));
}

// bind_cuda(function of bind, address of a kernel's `int64_t run(const Request*, int device, char* text)`, device)
PyObject* bind_cuda(PyObject*, PyObject* arguments) {
  PyObject* function;
  unsigned long long address;
  int device;
  if (!PyArg_ParseTuple(arguments, "O!Ki", &PyCFunction_Type, &function, &address, &device)) return nullptr;
  auto* ways = static_cast<Ways*>(PyCapsule_GetPointer(PyCFunction_GetSelf(function), nullptr));
  if (!ways) return nullptr;
  ways->cuda[device] = reinterpret_cast<std::remove_reference_t<decltype(ways->cuda[0])>>(address);
  Py_RETURN_NONE;
}

// Of the state, the inputs and what follows them, the items at these places.
PyObject* pick(PyObject* capsule, PyObject* const* arguments, Py_ssize_t n_arguments) {
  const auto& places = *static_cast<std::vector<int64_t>*>(PyCapsule_GetPointer(capsule, nullptr));
  if (n_arguments < 2 || !is_sequence(arguments[0]) || !is_sequence(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "pick: expected two lists or tuples");
    return nullptr;
  }
  PyObject* const* const parts[] = {PySequence_Fast_ITEMS(arguments[0]), PySequence_Fast_ITEMS(arguments[1]), arguments + 2};
  const Py_ssize_t first = PySequence_Fast_GET_SIZE(arguments[0]), second = first + PySequence_Fast_GET_SIZE(arguments[1]);
  const Py_ssize_t begins[] = {0, first, second}, end = second + n_arguments - 2, n = Py_ssize_t(places.size());
  PyObject* picked = PyTuple_New(n);
  for (Py_ssize_t k = 0; picked && k < n; k++) {
    const Py_ssize_t place = places[size_t(k)];
    if (place < 0 || place >= end) {
      Py_DECREF(picked);
      PyErr_SetString(PyExc_IndexError, "pick: a place beyond the values");
      return nullptr;
    }
    const int part = (place >= first) + (place >= second);
    PyTuple_SET_ITEM(picked, k, Py_NewRef(parts[part][place - begins[part]]));
  }
  return picked;
}

PyMethodDef picked = fxopt::method("pick", pick);

void drop_places(PyObject* capsule) { delete static_cast<std::vector<int64_t>*>(PyCapsule_GetPointer(capsule, nullptr)); }

// picker(buffer of int64) -> a function
PyObject* picker(PyObject*, PyObject* buffer) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0) return nullptr;
  const auto* first = static_cast<const int64_t*>(view.buf);
  auto* places = new std::vector<int64_t>(first, first + view.len / Py_ssize_t(sizeof(int64_t)));
  PyBuffer_Release(&view);
  PyObject* capsule = PyCapsule_New(places, nullptr, &drop_places);
  PyObject* function = capsule ? PyCFunction_New(&picked, capsule) : nullptr;
  Py_XDECREF(capsule);
  return function;
}

PyMethodDef methods[] = {
    {"picker", &picker, METH_O, nullptr},
    {"bind", &bind, METH_O, nullptr},
    {"bind_cuda", &bind_cuda, METH_VARARGS, nullptr},
    fxopt::method("readable", fxopt::readable),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_entry", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_entry() { return PyModule_Create(&module); }
