// Host side of a call: checks a plan against its tensors and writes what the device reads. No CUDA, no torch.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "../sizes.h"
#include "record.h"

namespace fxopt::cuda {

template <class To, class From>
inline To bits_as(From from) {
  To to{};
  memcpy(&to, &from, sizeof from < sizeof to ? sizeof from : sizeof to);
  return to;
}

// An operand (int64 or double bits, as `is_double` says) in the type in which a step of `dtype` uses it.
inline int64_t operand(int64_t bits, bool is_double, int dtype) {
  const double value = is_double ? bits_as<double>(bits) : double(bits);
  if (!is_floating(dtype)) return wrap(is_double ? int64_t(value) : bits, dtype);
  return dtype == kDouble ? bits_as<int64_t>(value) : bits_as<int64_t>(float(value));
}

// Numbers the pointers and sizes that a launch carries.
struct Words {
  std::vector<int64_t> values;
  std::vector<int32_t> of_tensor, of_output;

  Words(int64_t n_tensors, int64_t n_outputs) : of_tensor(n_tensors, -1), of_output(n_outputs, -1) {}
  int32_t add(int64_t value) {
    values.push_back(value);
    return int32_t(values.size() - 1);
  }
  int32_t tensor(const Array* tensors, int64_t index) {
    if (of_tensor[index] < 0) of_tensor[index] = add(reinterpret_cast<int64_t>(tensors[index].data));
    return of_tensor[index];
  }
  int32_t output(int64_t index, const char* data) {
    if (of_output[index] < 0) of_output[index] = add(reinterpret_cast<int64_t>(data));
    return of_output[index];
  }
};

struct Resolved {
  View view;
  int64_t rows, lanes;
};

struct Resolver : Given {
  Words words;

  Resolver(const Request& request) : Given(given_of(request)), words(n_tensors, plan.header->n_outputs) {}

  const Array& tensor(const Column& column, int64_t index) const {
    if (index < 0 || index >= n_tensors) refused("column %d: tensor %lld of %lld", column.index, (long long)index, (long long)n_tensors);
    const Array& array = tensors[index];
    if (!element_size(array.dtype)) refused("column %d: tensor %lld has an unknown dtype", column.index, (long long)index);
    return array;
  }

  // `rows` is the number that a Source without row dims repeats over.
  Resolved source(const Column& column, const Source& source, int64_t rows) {
    const Array& array = tensor(column, source.tensor);
    const int size = element_size(array.dtype);
    if (source.row0 >= array.dim || source.row1 >= array.dim || source.lane >= array.dim)
      refused("column %d: tensor %d has %d dims, which its source does not fit", column.index, source.tensor, array.dim);
    Resolved found{{words.tensor(tensors, source.tensor), array.dtype, 0, 0, 0, 0, 0}, rows, 1};
    View& view = found.view;
    for (int k = 0; k < source.n_fixed; k++) {
      const Fixed& fixed = plan.fixed[source.fixed_at + k];
      if (fixed.dim >= array.dim || fixed.index < 0 || fixed.index >= array.sizes[fixed.dim])
        refused("column %d: index %lld of dim %lld is outside tensor %d", column.index, (long long)fixed.index, (long long)fixed.dim, source.tensor);
      view.offset += fixed.index * array.strides[fixed.dim] * size;
    }
    if (source.row0 >= 0) {
      found.rows = array.sizes[source.row0];
      view.row_stride = array.strides[source.row0] * size;
    }
    if (source.row1 >= 0) {
      view.inner = array.sizes[source.row1];
      view.inner_stride = array.strides[source.row1] * size;
      found.rows *= view.inner;
      if (view.inner * view.inner_stride == view.row_stride && !adds(column)) {
        view.row_stride = view.inner_stride;
        view.inner = 0;
      }
    }
    if (source.lane >= 0) {
      const int64_t available = array.sizes[source.lane] - source.start;
      found.lanes = source.length < 0 ? available : source.length;
      if (source.start < 0 || found.lanes < 0 || found.lanes > available)
        refused("column %d: lanes [%lld, %lld) are outside dim %d of tensor %d", column.index, (long long)source.start,
             (long long)(source.start + found.lanes), source.lane, source.tensor);
      view.lane_stride = array.strides[source.lane] * size;
      view.offset += source.start * view.lane_stride;
    }
    return found;
  }

  bool adds(const Column& column) const {
    for (int s = 0; s < column.program_size; s++)
      if (plan.instrs[column.program_at + s].op == kAddTensor) return true;
    return false;
  }

  // A source with its program, whose steps are appended. `counted`: the value is a count of lanes, and has no source.
  Values values(const Column& column, const View& view, int at, int size, int64_t inner, bool counted, std::vector<Step>& steps) {
    Values found{view, int32_t(steps.size()), size, counted ? kInt64 : view.dtype};
    int saved[kRegisters] = {found.dtype, found.dtype};
    for (int s = 0; s < size; s++) {
      const Instr& instr = plan.instrs[at + s];
      Step step{};
      step.op = instr.op;
      step.dtype = instr.op == kSave || instr.op == kKeep ? uint8_t(found.dtype) : instr.op == kSwap ? uint8_t(saved[instr.b]) : instr.dtype;
      step.compare = instr.compare;
      step.a = operand(instr.a, instr.kinds & 1, instr.op == kBucketize ? kInt64 : instr.op == kWhere ? saved[0] : step.dtype);
      if (instr.op == kSave || instr.op == kSwap) {
        saved[instr.b] = found.dtype;
        step.b = instr.b;
      } else if (instr.op == kCombine) {
        step.b = instr.b;
      } else if (instr.op == kWhere) {
        step.b = operand(instr.b, instr.kinds & 2, instr.dtype);
      } else if (instr.op == kBucketize) {
        const Array& edges = vector(column, instr.tensor, step);
        if (edges.dtype != found.dtype) refused("column %d: values and boundaries must have one dtype", column.index);
      } else if (instr.op == kAddTensor) {
        if (vector(column, instr.tensor, step).sizes[0] != inner) refused("column %d: the added tensor must have one value per lane", column.index);
      } else if (instr.op == kDiv) {
        step.a = reciprocal(instr.a, instr.kinds & 1, step.dtype);
      } else if (instr.op == kRemainder || instr.op == kFmod || instr.op == kFloorDivide) {
        step.magic = magic(column, step.a);
      }
      found.dtype = step.dtype;
      steps.push_back(step);
    }
    return found;
  }

 private:
  const Array& vector(const Column& column, int64_t index, Step& step) const {
    const Array& array = tensor(column, index);
    if (array.dim != 1 || array.sizes[0] > INT32_MAX) refused("column %d: tensor %lld must be 1-D", column.index, (long long)index);
    step.tensor = array.data;
    step.tensor_dtype = uint8_t(array.dtype);
    step.n = int32_t(array.sizes[0]);
    step.stride = array.strides[0] * element_size(array.dtype);
    return array;
  }

  static uint64_t magic(const Column& column, int64_t signed_a) {
    const uint64_t a = signed_a < 0 ? 0 - uint64_t(signed_a) : uint64_t(signed_a);
    if (a == 0) refused("column %d: division by zero", column.index);
    return a == 1 ? ~uint64_t(0) : uint64_t((static_cast<unsigned __int128>(1) << 64) / a);
  }

  // Rounded once: 1e39 has a reciprocal in float, and 16777217 has one of its own.
  static int64_t reciprocal(int64_t bits, bool is_double, int dtype) {
    const double value = 1.0 / (is_double ? bits_as<double>(bits) : double(bits));
    return dtype == kDouble ? bits_as<int64_t>(value) : bits_as<int64_t>(float(value));
  }
};

}  // namespace fxopt::cuda
