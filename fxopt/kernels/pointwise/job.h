// One call: the plan with the sizes of its inputs. Axes [0, outer) are the rows, which are cut into blocks; the others
// lie within a row.
#pragma once
#include <algorithm>
#include <vector>

#include "checked.h"

namespace fxopt {

constexpr int64_t kBlockFloats = 2048;  // of the largest value of a block
constexpr int64_t kScratchFloats = 12288;  // of all values: 48 KB, a first-level cache

struct Value {
  int64_t inner;         // elements in a row
  bool by_row;           // has an axis among the rows
  bool once;             // the same in every block: made before the first
  bool direct;           // lies in a tensor, dense: no scratch memory
  char* base;            // of the tensor
  int64_t offset;        // of its scratch memory, in floats
  int32_t dtype;
  Loops loops;           // of an input that is copied; of an expansion
};

struct Job : Plan {
  const Kernels* kernels;
  int64_t sizes[kMostAxes], outer, rows, block, scratch;
  double nanoseconds;
  std::vector<Value> values;
  std::vector<int64_t> slots;           // elements in a row, then offsets
  std::vector<char*> results;
  std::vector<const Array*> tensors;

  bool has_rows(int64_t mask) const { return (mask & ((int64_t(1) << outer) - 1)) != 0; }
  int64_t count(int64_t mask, int64_t first, int64_t last) const {
    int64_t n = 1;
    for (int64_t axis = first; axis < last; axis++)
      if (mask >> axis & 1) n *= sizes[axis];
    return n;
  }

  void resolve(const Request& request, const Kernels& chosen) {
    kernels = &chosen;
    read(request);
    if (request.n_operands != header->n_inputs)
      refused("fxopt.pointwise: expected %lld inputs, found %lld", (long long)header->n_inputs, (long long)request.n_operands);
    measure(request.operands);
    choose_rows();
    values.resize(size_t(header->n_inputs + header->n_steps));
    tensors.resize(size_t(header->n_inputs));
    slots.assign(size_t(header->n_slots), 0);
    for (int64_t k = 0; k < header->n_inputs; k++) resolve_input(k, request.operands[k]);
    for (int64_t k = 0; k < header->n_steps; k++) resolve_step(k);
    allocate(request);
    place();
  }

 private:
  void measure(const Array* operands) {
    for (int64_t& size : sizes) size = -1;
    for (int64_t k = 0; k < header->n_inputs; k++) {
      const Array& tensor = operands[k];
      const Input& input = inputs[k];
      if (tensor.dim != input.dims) refused("fxopt.pointwise: input %lld has %d dims instead of %lld", (long long)k, tensor.dim, (long long)input.dims);
      switch (tensor.dtype) {
        case 0: case 3: case 4: case 6: case 11: break;
        default: refused("fxopt.pointwise: input %lld is of a dtype that it does not read", (long long)k);
      }
      int64_t elements = 1;
      for (int32_t d = 0; d < tensor.dim; d++) elements *= tensor.sizes[d];
      int64_t expected = 1;
      for (int64_t axis = 0; axis < header->axes; axis++) {
        const int64_t dim = input.dim_of[axis];
        if (dim < 0) continue;
        const int64_t size = tensor.sizes[dim];
        if (sizes[axis] >= 0 && sizes[axis] != size)
          refused("fxopt.pointwise: input %lld has size %lld at dim %lld instead of %lld", (long long)k, (long long)size, (long long)dim, (long long)sizes[axis]);
        sizes[axis] = size;
        expected *= size;
      }
      if (elements != expected) refused("fxopt.pointwise: input %lld is larger than its plan says", (long long)k);
    }
    int64_t elements = 1;
    for (int64_t axis = 0; axis < header->axes; axis++) {
      if (sizes[axis] < 0) refused("fxopt.pointwise: no input has axis %lld", (long long)axis);
      elements = product(elements, std::max<int64_t>(sizes[axis], 1));  // of any value, whichever axes it has
    }
  }

  // The fewest axes as rows that leave a row small.
  void choose_rows() {
    const int64_t all = (int64_t(1) << header->axes) - 1;
    outer = 1;
    while (outer < header->outer && count(all, outer, header->axes) > kBlockFloats) outer++;
    rows = count(all, 0, outer);
  }

  void describe(Value& value, int64_t mask) {
    value.inner = count(mask, outer, header->axes);
    value.by_row = has_rows(mask);
    value.direct = false;
  }

  void resolve_input(int64_t k, const Array& tensor) {
    Value& value = values[k];
    tensors[k] = &tensor;
    const Input& input = inputs[k];
    describe(value, input.mask);
    value.once = !value.by_row;
    value.dtype = tensor.dtype;
    value.base = tensor.data;
    bool dense = tensor.dtype == kDtypeFloat;
    int64_t expected = 1;
    for (int64_t axis = header->axes - 1; axis >= 0; axis--) {
      const int64_t dim = input.dim_of[axis];
      if (dim < 0) dense &= !(value.by_row && axis < outer && sizes[axis] != 1);
      else if (sizes[axis] != 1) dense &= tensor.strides[dim] == expected, expected *= sizes[axis];
    }
    value.direct = dense;
    if (dense) return;
    slots[k] = value.inner;
    value.loops.depth = 0;
    for (int64_t axis = outer; axis < header->axes; axis++)
      if (const int64_t dim = input.dim_of[axis]; dim >= 0) value.loops.add(sizes[axis], tensor.strides[dim]);
  }

  void resolve_step(int64_t k) {
    Value& value = values[header->n_inputs + k];
    const Step& step = steps[k];
    describe(value, step.mask);
    value.once = true;
    for (int64_t operand : step.operands)
      if (operand >= 0 && operand < header->n_inputs + k) value.once &= values[operand].once;
    int64_t& slot = slots[step.slot];
    if (slot < value.inner) slot = value.inner;
    if (step.op == kExpand) resolve_expansion(value, step);
    if ((step.op == kAmax || step.op == kAmin) && count(mask_of(step.operands[0]) & ~step.mask, 0, header->axes) == 0)
      refused("fxopt.pointwise: an extremum over no numbers");
  }

  void resolve_expansion(Value& value, const Step& step) {
    const int64_t mask = mask_of(step.operands[0]);
    int64_t stride = count(mask, outer, header->axes);
    value.loops.depth = 0;
    for (int64_t axis = outer; axis < header->axes; axis++) {
      const bool is_there = mask >> axis & 1;
      if (is_there) stride = sizes[axis] ? stride / sizes[axis] : 0;
      if (step.mask >> axis & 1) value.loops.add(sizes[axis], is_there ? stride : 0);
    }
  }

  void allocate(const Request& request) {
    results.clear();
    for (int64_t k = 0; k < header->n_outputs; k++) {
      const Output& output = outputs[k];
      int64_t shape[kMostAxes];
      for (int64_t d = 0; d < output.dims; d++) shape[d] = output.axes[d] < 0 ? 1 : sizes[output.axes[d]];
      results.push_back(request.allocate(request.context, int32_t(output.dims), shape, int32_t(output.dtype)));
      if (output.dtype != kDtypeFloat) continue;
      Value& value = values[output.value];
      value.direct = true;  // written where it belongs
      value.base = results.back();
    }
  }

  // Rows in a block, and where each slot lies.
  void place() {
    int64_t widest = 1, row = 1;
    nanoseconds = 0;
    for (const Value& value : values) {
      widest = value.inner > widest ? value.inner : widest;
      nanoseconds += value.by_row ? 0.1 * double(value.inner) * double(rows) : 0;
    }
    for (int64_t slot : slots) row += slot;
    block = kBlockFloats / widest;
    if (block > kScratchFloats / row) block = kScratchFloats / row;
    block = block < 1 ? 1 : block > rows ? rows : block;
    scratch = 0;
    for (int64_t& slot : slots) {
      const int64_t size = slot * block;
      slot = scratch;
      scratch += (size + 15) / 16 * 16;
    }
    for (int64_t k = 0; k < header->n_inputs; k++) values[k].offset = slots[k];
    for (int64_t k = 0; k < header->n_steps; k++) values[header->n_inputs + k].offset = slots[steps[k].slot];
  }
};

}  // namespace fxopt
