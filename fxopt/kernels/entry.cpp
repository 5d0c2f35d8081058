// Python's own way into the kernels, past the dispatcher: boxing 2000 tensors costs that about 650 us, this 20. It takes
// plain CPU tensors, or plain tensors of one CUDA device, with nothing to record, reads them where they are and calls the
// kernel. For everything else it answers None.
#include <ATen/ops/empty.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "picked.h"

namespace {

// An operator's kernels, null where there is none. On CUDA: how many of the allocated tensors are outputs, the others
// being scratch; or -1, and `text` (256 bytes) says what is wrong.
struct Ways {
  void (*cpu)(const fxopt::Request*) = nullptr;
  int64_t (*cuda[fxopt::kMostDevices])(const fxopt::Request*, int device, char* text) = {};
};

using fxopt::Place;

bool is_picked(PyObject* argument) { return Py_IS_TYPE(argument, picked_type); }

// A CUDA tensor in front says that all are expected on its device.
Place place_of(PyObject* first, const Ways& ways) {
  Place place;
  if (is_picked(first)) {
    const auto& picked = *reinterpret_cast<Picked*>(first);
    if (picked.places().empty()) return place;
    first = picked.parts().at(picked.places()[0]);
  } else if (is_sequence(first)) {
    if (PySequence_Fast_GET_SIZE(first) == 0) return place;
    first = PySequence_Fast_ITEMS(first)[0];
  }
  const Place found = fxopt::is_plain(first) ? Place::of(fxopt::tensor_of(first)) : place;
  return found.device >= 0 && ways.cuda[found.device] ? found : place;
}

// The dependent loads from list to storage, started early: they are most of what unpacking 2000 tensors costs. A cold call
// of 1000 columns takes 550 us with half these distances, and 524 so.
template <class Items>
void prefetch(Items item, Py_ssize_t k, Py_ssize_t n, const Place& place) {
  if (k + 48 < n) __builtin_prefetch(reinterpret_cast<fxopt::PythonTensor*>(item(k + 48)));
  if (k + 32 < n && fxopt::is_plain(item(k + 32))) fxopt::prefetch_metadata(fxopt::tensor_of(item(k + 32)));
  if (k + 16 < n && fxopt::is_plain(item(k + 16))) {
    const at::Tensor& tensor = fxopt::tensor_of(item(k + 16));
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
    if (is_picked(argument)) return append(*reinterpret_cast<Picked*>(argument), place);
    if (!is_sequence(argument)) return read(argument, place, *next(1));
    PyObject** items = PySequence_Fast_ITEMS(argument);
    return append([&](Py_ssize_t k) { return items[k]; }, PySequence_Fast_GET_SIZE(argument), place);
  }

  template <class Items>
  bool append(Items item, Py_ssize_t count, const Place& place) {
    fxopt::Array* to = next(size_t(count));
    for (Py_ssize_t k = 0; k < count; k++) {
      prefetch(item, k, count, place);
      if (!read(item(k), place, to[k])) return false;
    }
    return true;
  }

  // What the check of the call has read is taken from there.
  bool append(const Picked& picked, const Place& place) {
    const Parts parts = picked.parts();
    const std::vector<int64_t>& places = picked.places();
    const fxopt::Array *state = known(picked.state, place), *inputs = known(picked.inputs, place);
    const auto item = [&](Py_ssize_t k) { return parts.at(places[size_t(k)]); };
    if (!state || !inputs) return append(item, Py_ssize_t(places.size()), place);
    fxopt::Array* to = next(places.size());
    for (size_t k = 0; k < places.size(); k++) {
      const int64_t at = places[k];
      if (at < parts.third) {
        to[k] = at < parts.second ? state[at] : inputs[at - parts.second];
      } else if (!read(item(Py_ssize_t(k)), place, to[k])) {
        return false;
      }
    }
    return true;
  }

  static const fxopt::Array* known(PyObject* object, const Place& place) {
    const auto* tensors = fxopt::as_tensors(object);
    return tensors ? tensors->at(place) : nullptr;
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
  if (!read(arguments[n_arguments - 1], Place{}, plan)) Py_RETURN_NONE;
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

PyMethodDef methods[] = {
    {"picker", &picker, METH_VARARGS, nullptr},
    {"bind", &bind, METH_O, nullptr},
    {"bind_cuda", &bind_cuda, METH_VARARGS, nullptr},
    fxopt::method("readable", fxopt::readable),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_entry", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_entry() {
  picked_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&picked_spec));
  return picked_type ? PyModule_Create(&module) : nullptr;
}
