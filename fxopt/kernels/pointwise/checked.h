// A plan in the words of a call, which may come from anywhere: the numbers that the kernels take on trust are checked
// here, as checks.py does it in Python, and those that depend on the tensors of a call in job.h.
#pragma once
#include "../entry.h"
#include "layout.h"

namespace fxopt {

inline void expect_plan(bool holds, const char* what) {
  if (!holds) refused("fxopt.pointwise: expected a plan made by text(), found %s", what);
}

// The words of one record.
template <class Record>
constexpr int64_t kWords = sizeof(Record) / sizeof(int64_t);

struct Plan {
  const Header* header;
  const Input* inputs;
  const Step* steps;
  const Output* outputs;

  void read(const Request& request) {
    const int64_t n = request.n_words;
    header = reinterpret_cast<const Header*>(request.words);
    expect_plan(n >= kWords<Header> && header->version == kVersion, "another text");
    for (int64_t count : {header->n_inputs, header->n_steps, header->n_outputs}) expect_plan(count > 0 && count <= n, "a number of records");
    const int64_t records = header->n_inputs * kWords<Input> + header->n_steps * kWords<Step> + header->n_outputs * kWords<Output>;
    expect_plan(kWords<Header> + records == n, "one that was cut off");
    expect_plan(header->axes > 0 && header->axes <= kMostAxes && header->outer > 0 && header->outer <= header->axes, "a number of axes");
    expect_plan(header->n_slots >= header->n_inputs && header->n_slots <= header->n_inputs + header->n_steps, "a number of slots");
    inputs = reinterpret_cast<const Input*>(header + 1);
    steps = reinterpret_cast<const Step*>(inputs + header->n_inputs);
    outputs = reinterpret_cast<const Output*>(steps + header->n_steps);
    for (int64_t k = 0; k < header->n_inputs; k++) check_input(inputs[k]);
    for (int64_t k = 0; k < header->n_steps; k++) check_step(steps[k], header->n_inputs + k);
    for (int64_t k = 0; k < header->n_outputs; k++) check_output(k);
  }

  int64_t mask_of(int64_t value) const { return value < header->n_inputs ? inputs[value].mask : steps[value - header->n_inputs].mask; }

 private:
  bool are_axes(int64_t mask) const { return mask >= 0 && mask >> header->axes == 0; }

  void check_input(const Input& input) const {
    int64_t mask = 0, dims = 0;
    for (int64_t axis = 0; axis < header->axes; axis++) {
      const int64_t dim = input.dim_of[axis];
      expect_plan(dim >= -1 && dim < input.dims && dim < 63, "an axis of no dim");
      if (dim < 0) continue;
      expect_plan(!(dims >> dim & 1), "two axes of one dim");
      dims |= int64_t(1) << dim, mask |= int64_t(1) << axis;
    }
    expect_plan(input.mask == mask, "an input of other axes");
  }

  void check_step(const Step& step, int64_t number) const {
    expect_plan(step.op >= kCopy && step.op <= kExpand && are_axes(step.mask), "a step");
    expect_plan(step.slot >= header->n_inputs && step.slot < header->n_slots, "a slot that is not there");
    const bool elementwise = step.op < kSum;
    expect_plan(step.n_operands == (step.op < kAdd || !elementwise ? 1 : step.op < kWhere ? 2 : 3), "a number of operands");
    for (int64_t k = 0; k < kMostOperands; k++) {
      const int64_t operand = step.operands[k];
      expect_plan(operand >= -1 && operand < number && (k < step.n_operands || operand < 0), "a step that reads what is made behind it");
      expect_plan(operand < 0 || !elementwise || mask_of(operand) == step.mask, "an operand of other axes");
    }
    if (elementwise) return;
    expect_plan(step.operands[0] >= 0, "a constant that is expanded or summed up");
    const int64_t mask = mask_of(step.operands[0]), less = step.op == kExpand ? mask : step.mask, more = step.op == kExpand ? step.mask : mask;
    const int64_t between = more & ~less;
    expect_plan((less & ~more) == 0 && between != 0, "an expansion to fewer axes, or a sum of more");
    if (step.op == kExpand) return;
    expect_plan((between & ((int64_t(1) << header->outer) - 1)) == 0, "a sum over rows");
    const int64_t first = between & -between, behind = more & ~(first - 1);  // from the first axis that is summed up on
    expect_plan((behind & ~between) == 0 || (behind & ~between & -(behind & ~between)) > between, "a sum over axes that are no neighbours");
  }

  void check_output(int64_t number) const {
    const Output& output = outputs[number];
    expect_plan(output.value >= header->n_inputs && output.value < header->n_inputs + header->n_steps, "an output that no step makes");
    expect_plan((output.dtype == kDtypeFloat || output.dtype == kDtypeBool) && output.dims >= 0 && output.dims <= kMostAxes, "an output");
    int64_t mask = 0;
    for (int64_t d = 0; d < output.dims; d++) {
      const int64_t axis = output.axes[d];
      expect_plan(axis >= -1 && axis < header->axes && (axis < 0 || mask >> axis == 0), "an output's axes");
      if (axis >= 0) mask |= int64_t(1) << axis;
    }
    const int64_t rows = (int64_t(1) << header->outer) - 1;
    expect_plan(mask == mask_of(output.value) && (mask & rows) == rows, "an output of other axes");
    for (int64_t k = 0; k < number; k++)
      expect_plan(outputs[k].value != output.value || outputs[k].dtype != kDtypeFloat || output.dtype != kDtypeFloat, "a value as two outputs");
  }
};

}  // namespace fxopt
