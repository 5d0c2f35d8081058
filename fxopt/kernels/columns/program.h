// Interprets a column's index program on a tile of values: one pass over the tile per instruction.
#pragma once
#include "bucketize.h"
#include "steps.h"

namespace fxopt::FXOPT_ISA {

struct Program {
  const Call* call;
  const Column* column;
  const View* view;
  const Instr* instrs;
  int size;

  bool fail(const char* what, int tensor, Error& error) const {
    return error.fail(column->index, 0, "column %d: %s, tensor %d", column->index, what, tensor);
  }

  bool bucketize_step(const Instr& instr, Value& v, int n, Error& error) const {
    const Array& b = call->tensors[instr.tensor];
    if (b.dim != 1) return fail("boundaries must be 1-D", instr.tensor, error);
    if (v.dtype != b.dtype) return fail("values and boundaries must have one dtype", instr.tensor, error);
    const int64_t m = b.sizes[0], stride = b.strides[0] * element_size(b.dtype);
    const bool right = as_int(instr.a, instr.kinds & 1);
    alignas(64) int64_t out[kTile];
    switch (b.dtype) {
      case kFloat: right ? bucketize<float, true>(b.data, stride, m, v.f, n, out) : bucketize<float, false>(b.data, stride, m, v.f, n, out); break;
      case kDouble: right ? bucketize<double, true>(b.data, stride, m, v.d, n, out) : bucketize<double, false>(b.data, stride, m, v.d, n, out); break;
      case kInt64: right ? bucketize<int64_t, true>(b.data, stride, m, v.i, n, out) : bucketize<int64_t, false>(b.data, stride, m, v.i, n, out); break;
      default: right ? bucketize_any<true>(b, stride, v, n, out) : bucketize_any<false>(b, stride, v, n, out);
    }
    memcpy(v.i, out, n * sizeof(int64_t));
    v.dtype = instr.dtype;
    return true;
  }

  // Narrow boundary types: widened one at a time, in torch's own search.
  template <bool RIGHT>
  static void bucketize_any(const Array& b, int64_t stride, const Value& v, int n, int64_t* out) {
    Value one;
    const auto boundary = [&](int64_t at) {
      load_run(b.dtype, b.data + at * stride, stride, 1, one, 0);
      return &one;
    };
    for (int k = 0; k < n; k++)
      out[k] = v.is_int() ? search<RIGHT>(b.sizes[0], v.i[k], [&](int64_t at) { return boundary(at)->i[0]; })
                          : search<RIGHT>(b.sizes[0], v.f[k], [&](int64_t at) { return boundary(at)->f[0]; });
  }

  bool add_tensor(const Instr& instr, Value& v, int64_t position, int n, Error& error) const {
    const Array& t = call->tensors[instr.tensor];
    if (t.dim != 1 || t.sizes[0] != view->inner || !element_size(t.dtype)) return fail("the added tensor must be 1-D with one value per lane", instr.tensor, error);
    Value added;
    View walk;
    walk.data = t.data;
    walk.dtype = t.dtype;
    walk.n[2] = view->inner;
    walk.stride[2] = t.strides[0] * element_size(t.dtype);
    walk.n[1] = INT64_MAX;
    load(walk, position, n, added);
    cast(instr.dtype, added, n);
    if (v.is_int()) {
      for (int k = 0; k < n; k++) v.i[k] = int64_t(uint64_t(v.i[k]) + uint64_t(added.i[k]));
      wrap_to(v.dtype, v.i, n);
    } else if (v.is_double()) {
      for (int k = 0; k < n; k++) v.d[k] += added.d[k];
    } else {
      for (int k = 0; k < n; k++) v.f[k] += added.f[k];
      round_to(v.dtype, v.f, n);
    }
    return true;
  }

  // The values of positions [position, position + n) after the program. `counts` starts as ones, and KEEP clears lanes.
  bool run(int64_t position, int n, Value& v, Error& error, uint8_t* counts = nullptr) const {
    load(*view, position, n, v);
    return apply(position, n, v, error, counts);
  }

  bool apply(int64_t position, int n, Value& v, Error& error, uint8_t* counts = nullptr) const {
    if (size == 0) return true;
    Value saved[kRegisters];
    for (Value& each : saved) each.dtype = kInt64;
    for (int s = 0; s < size; s++) {
      const Instr& instr = instrs[s];
      if (instr.tensor >= call->n_tensors) return fail("no such tensor", instr.tensor, error);
      switch (instr.op) {
        case kSave: saved[instr.b].dtype = v.dtype; memcpy(saved[instr.b].i, v.i, sizeof v.i); continue;
        case kSwap: std::swap(v, saved[instr.b]); continue;
        case kBucketize:
          if (!bucketize_step(instr, v, n, error)) return false;
          continue;
        case kKeep: if (counts) keep(instr, v, n, counts); continue;
        default: cast(instr.dtype, v, n);
      }
      if (instr.op == kWhere) where(instr, saved[0], v, n);
      else if (instr.op == kAddTensor) { if (!add_tensor(instr, v, position, n, error)) return false; }
      else if (instr.op == kCast) continue;
      else if (instr.op == kCombine) { if (v.is_int() && saved[instr.b].is_int()) combine(instr, saved[instr.b].i, v.i, n); }
      else if (v.is_int()) step_int(instr, v.i, n);
      else if (v.is_double()) step_float(instr, v.d, n);
      else { step_float(instr, v.f, n); round_to(v.dtype, v.f, n); }
    }
    return true;
  }
};

}  // namespace fxopt::FXOPT_ISA
