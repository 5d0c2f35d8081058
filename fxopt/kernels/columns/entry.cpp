// Python's own way into the kernel, past the dispatcher: boxing 2000 tensors costs it about 650 us, this 20.
// It takes plain CPU tensors, or plain tensors of one CUDA device, with nothing to record; for everything else it
// answers None.
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <stdexcept>
#include <vector>

#include "../../torch_internals/python_call.h"
#include "../refused.h"
#include "entry.h"

namespace {

using Run = void (*)(const fxopt::Request*);
using RunCuda = bool (*)(const fxopt::Request*, int device, char* text);
Run run = nullptr;
RunCuda run_cuda[fxopt::kMostDevices] = {};  // null where a device has no kernel

const uint64_t kPlainCuda = c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
                                                 c10::DispatchKey::ADInplaceOrView}).raw_repr();

// Where the tensors of a call must be. device -1: the CPU.
struct Place {
  uint64_t keys = kPlain;
  int device = -1;
  bool grad_mode;

  bool holds(const c10::TensorImpl* impl) const {
    return (impl->key_set().raw_repr() & ~keys) == 0 && !(grad_mode && impl->requires_grad()) &&
           impl->numel() <= fxopt::kMostElements && (device < 0 || impl->device().index() == device);
  }
};

bool append(PyObject* item, const Place& place, std::vector<fxopt::Array>& arrays) {
  if (!fxopt::is_plain(item)) return false;
  const at::Tensor& tensor = fxopt::tensor_of(item);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!place.holds(impl)) return false;
  const auto sizes = impl->sizes();
  arrays.push_back({static_cast<char*>(const_cast<void*>(impl->data())), sizes.data(), impl->strides().data(),
                    int32_t(sizes.size()), int32_t(c10::typeMetaToScalarType(impl->dtype()))});
  return true;
}

// The dependent loads from list to storage, started early: they are most of what unpacking 2000 tensors costs.
void prefetch(PyObject** items, Py_ssize_t k, Py_ssize_t n, const Place& place) {
  if (k + 12 < n) __builtin_prefetch(reinterpret_cast<fxopt::PythonTensor*>(items[k + 12]));
  if (k + 8 < n && fxopt::is_plain(items[k + 8])) {
    const char* impl = reinterpret_cast<const char*>(fxopt::tensor_of(items[k + 8]).unsafeGetTensorImpl());
    for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(impl + line);
  }
  if (k + 4 < n && fxopt::is_plain(items[k + 4])) {
    const c10::TensorImpl* impl = fxopt::tensor_of(items[k + 4]).unsafeGetTensorImpl();
    if ((impl->key_set().raw_repr() & ~place.keys) == 0) __builtin_prefetch(impl->unsafe_storage().unsafeGetStorageImpl());
  }
}

bool append_all(PyObject* sequence, const Place& place, std::vector<fxopt::Array>& arrays) {
  const bool is_list = PyList_CheckExact(sequence);
  if (!is_list && !PyTuple_CheckExact(sequence)) return false;
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence);
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  for (Py_ssize_t k = 0; k < n; k++) {
    prefetch(items, k, n, place);
    if (!append(items[k], place, arrays)) return false;
  }
  return true;
}

// A CUDA tensor in front says that all are expected on its device.
Place place_of(PyObject* sequence, bool grad_mode) {
  Place place;
  place.grad_mode = grad_mode;
  if (!PySequence_Check(sequence) || PySequence_Size(sequence) == 0) return place;
  PyObject* first = PyList_CheckExact(sequence) || PyTuple_CheckExact(sequence) ? PySequence_Fast_ITEMS(sequence)[0] : nullptr;
  if (!first || !fxopt::is_plain(first) || !fxopt::tensor_of(first).is_cuda()) return place;
  const int device = fxopt::tensor_of(first).device().index();
  if (!run_cuda[device]) return place;
  place.keys = kPlainCuda;
  place.device = device;
  return place;
}

struct Results {
  std::vector<at::Tensor> tensors;
  int device;
};

char* allocate(void* context, int64_t rows, int64_t width, int32_t dtype) {
  auto& results = *static_cast<Results*>(context);
  auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype));
  if (results.device >= 0) options = options.device(at::Device(at::kCUDA, c10::DeviceIndex(results.device)));
  results.tensors.push_back(at::empty({rows, width}, options));
  return static_cast<char*>(results.tensors.back().mutable_data_ptr());
}

// call(tensors, tables, plan) -> list of tensors, or None: use the dispatcher. The caller's lists must not change
// meanwhile, since the GIL is released and they alone keep the tensors alive.
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {
  if (n_arguments != 3) {
    PyErr_SetString(PyExc_TypeError, "call(tensors, tables, plan) takes three arguments");
    return nullptr;
  }
  thread_local std::vector<fxopt::Array> arrays;
  arrays.clear();
  const Place place = place_of(arguments[0], c10::GradMode::is_enabled());
  if (!run || !undisturbed() || !append_all(arguments[0], place, arrays)) Py_RETURN_NONE;
  const int64_t n_tensors = int64_t(arrays.size());
  const Place on_cpu{kPlain, -1, place.grad_mode};
  if (!append_all(arguments[1], place, arrays) || !append(arguments[2], on_cpu, arrays)) Py_RETURN_NONE;
  const fxopt::Array plan = arrays.back();
  if (plan.dtype != fxopt::kInt64 || plan.dim != 1 || plan.strides[0] != 1) Py_RETURN_NONE;
  Results results{{}, place.device};
  const fxopt::Request request{arrays.data(), arrays.data() + n_tensors, n_tensors, int64_t(arrays.size()) - n_tensors - 1,
                               reinterpret_cast<const int64_t*>(plan.data), plan.sizes[0], allocate, &results};
  const bool ran = ran_without_gil([&] {
    char text[256];
    if (place.device < 0) run(&request);
    else if (!run_cuda[place.device](&request, place.device, text)) throw std::runtime_error(text);
  });
  if (!ran) return nullptr;
  results.tensors.resize(size_t(reinterpret_cast<const fxopt::Header*>(plan.data)->n_outputs));  // the rest is scratch
  return as_list(results.tensors);
}

// bind(address of fxopt_columns_run)
PyObject* bind(PyObject*, PyObject* address) {
  run = reinterpret_cast<Run>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// bind_cuda(address of fxopt_cuda_run, device)
PyObject* bind_cuda(PyObject*, PyObject* arguments) {
  unsigned long long address;
  int device;
  if (!PyArg_ParseTuple(arguments, "Ki", &address, &device)) return nullptr;
  run_cuda[device] = reinterpret_cast<RunCuda>(address);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)), METH_FASTCALL, nullptr},
    {"bind", &bind, METH_O, nullptr},
    {"bind_cuda", &bind_cuda, METH_VARARGS, nullptr},
    {"readable", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&fxopt::readable)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxopt_columns_entry", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fxopt_columns_entry() { return PyModule_Create(&module); }
