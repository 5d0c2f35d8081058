// The operands of a call, picked by their places from the model's state, its inputs and what the graph made of them.
#pragma once
#include <algorithm>
#include <vector>

#include "operand.h"

namespace {

bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_CheckExact(object); }

struct Places {
  std::vector<int64_t> at;
  int64_t end = 0;  // beyond the last of them
};

const Places& places_of(PyObject* capsule) { return *static_cast<Places*>(PyCapsule_GetPointer(capsule, nullptr)); }

// Three sequences as one, by place.
struct Parts {
  PyObject* const* items[3];
  Py_ssize_t second, third, end;  // where they begin, the first at 0; the end

  Parts(PyObject* state, PyObject* inputs, PyObject* const* others, Py_ssize_t n_others)
      : items{PySequence_Fast_ITEMS(state), PySequence_Fast_ITEMS(inputs), others},
        second(PySequence_Fast_GET_SIZE(state)), third(second + PySequence_Fast_GET_SIZE(inputs)), end(third + n_others) {}

  PyObject* at(Py_ssize_t place) const {
    const Py_ssize_t begins[] = {0, second, third};
    const int part = (place >= second) + (place >= third);
    return items[part][place - begins[part]];
  }
};

// A sequence that a kernel reads where its items lie: a tuple of 2900 of them takes 8 us to make and drop.
struct Picked {
  PyObject_HEAD
  PyObject *state, *inputs, *others, *capsule;  // others: a tuple; capsule: of the places

  Parts parts() const {
    return {state, inputs, PySequence_Fast_ITEMS(others), PyTuple_GET_SIZE(others)};
  }
  const std::vector<int64_t>& places() const { return places_of(capsule).at; }
};

PyTypeObject* picked_type;

void picked_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Picked*>(object);
  for (PyObject* part : {self->state, self->inputs, self->others, self->capsule}) Py_XDECREF(part);
  PyObject_Free(self);
  Py_DECREF(picked_type);
}

Py_ssize_t picked_length(PyObject* self) { return Py_ssize_t(reinterpret_cast<Picked*>(self)->places().size()); }

PyObject* picked_item(PyObject* self, Py_ssize_t k) {
  if (k < 0 || k >= picked_length(self)) {
    PyErr_SetString(PyExc_IndexError, "Picked: no such item");
    return nullptr;
  }
  const auto& picked = *reinterpret_cast<Picked*>(self);
  return Py_NewRef(picked.parts().at(picked.places()[size_t(k)]));
}

PyType_Slot picked_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(picked_dealloc)},
    {Py_sq_length, reinterpret_cast<void*>(picked_length)},
    {Py_sq_item, reinterpret_cast<void*>(picked_item)},
    {0, nullptr},
};
PyType_Spec picked_spec = {"fxopt_entry.Picked", sizeof(Picked), 0, Py_TPFLAGS_DEFAULT, picked_slots};

// Whether the places are among `arguments`: state, inputs, *others; else an error is set.
bool are_within(const Places& places, PyObject* const* arguments, Py_ssize_t n_arguments) {
  if (n_arguments < 2 || !is_sequence(arguments[0]) || !is_sequence(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "pick: expected two lists or tuples");
    return false;
  }
  if (places.end > Parts(arguments[0], arguments[1], arguments + 2, n_arguments - 2).end) {
    PyErr_SetString(PyExc_IndexError, "pick: a place beyond the values");
    return false;
  }
  return true;
}

// The tuple of them.
PyObject* pick(PyObject* capsule, PyObject* const* arguments, Py_ssize_t n_arguments) {
  const Places& places = places_of(capsule);
  if (!are_within(places, arguments, n_arguments)) return nullptr;
  const Parts parts(arguments[0], arguments[1], arguments + 2, n_arguments - 2);
  const auto n = Py_ssize_t(places.at.size());
  PyObject* tuple = PyTuple_New(n);
  for (Py_ssize_t k = 0; tuple && k < n; k++) PyTuple_SET_ITEM(tuple, k, Py_NewRef(parts.at(places.at[size_t(k)])));
  return tuple;
}

// The same to be read by a kernel; with gradients on, when no kernel is called from here, the tuple.
PyObject* pick_in_place(PyObject* capsule, PyObject* const* arguments, Py_ssize_t n_arguments) {
  if (c10::GradMode::is_enabled()) return pick(capsule, arguments, n_arguments);
  if (!are_within(places_of(capsule), arguments, n_arguments)) return nullptr;
  PyObject* others = PyTuple_New(n_arguments - 2);
  if (!others) return nullptr;
  for (Py_ssize_t k = 2; k < n_arguments; k++) PyTuple_SET_ITEM(others, k - 2, Py_NewRef(arguments[k]));
  auto* picked = PyObject_New(Picked, picked_type);
  if (!picked) {
    Py_DECREF(others);
    return nullptr;
  }
  picked->state = Py_NewRef(arguments[0]);
  picked->inputs = Py_NewRef(arguments[1]);
  picked->others = others;
  picked->capsule = Py_NewRef(capsule);
  return reinterpret_cast<PyObject*>(picked);
}

PyMethodDef pick_method = fxopt::method("pick", pick), pick_in_place_method = fxopt::method("pick", pick_in_place);

void drop_places(PyObject* capsule) { delete static_cast<Places*>(PyCapsule_GetPointer(capsule, nullptr)); }

// picker(buffer of int64, in_place) -> a function
PyObject* picker(PyObject*, PyObject* arguments) {
  Py_buffer view;
  int in_place;
  if (!PyArg_ParseTuple(arguments, "y*p", &view, &in_place)) return nullptr;
  const auto* first = static_cast<const int64_t*>(view.buf);
  auto* places = new Places{{first, first + view.len / Py_ssize_t(sizeof(int64_t))}};
  PyBuffer_Release(&view);
  for (const int64_t place : places->at) places->end = std::max(places->end, place < 0 ? INT64_MAX : place + 1);
  PyObject* capsule = PyCapsule_New(places, nullptr, &drop_places);
  PyObject* function = capsule ? PyCFunction_New(in_place ? &pick_in_place_method : &pick_method, capsule) : nullptr;
  Py_XDECREF(capsule);
  return function;
}

}  // namespace
