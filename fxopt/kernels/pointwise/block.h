// One thread's share of a call: its scratch memory, and the steps on one block of rows after the other.
#pragma once
#include <algorithm>
#include <cstring>

#include "../scratch.h"
#include "job.h"

namespace fxopt {

constexpr int64_t kPrefetchFloats = 4096;  // of each input
constexpr int kConstantLanes = 16;  // the widest vector

class Worker {
 public:
  explicit Worker(const Job& job) : job_(job), data_(pointers()) {
    const int64_t n_constants = job.header->n_steps * 3 * kConstantLanes;
    float* memory = reinterpret_cast<float*>(scratch(size_t(job.scratch + n_constants) * sizeof(float)));
    constants_ = memory + job.scratch;
    data_.resize(job.values.size());
    for (size_t v = 0; v < data_.size(); v++) data_[v] = memory + job.values[v].offset;
    const int64_t n = job.header->n_inputs;
    for (int64_t k = 0; k < n; k++) {
      const Value& value = job.values[k];
      if (!value.once) continue;
      if (value.direct) data_[k] = reinterpret_cast<float*>(value.base);
      else job.kernels->gather(data_[k], value.base, value.dtype, value.loops);
    }
    for (int64_t k = 0; k < job.header->n_steps; k++) {
      spread_constants(k);
      if (job.values[n + k].once) run_step(k, job.block);
    }
  }

  // The rows of the block that begins at row0.
  void run(int64_t row0) {
    const int64_t n = job_.header->n_inputs, rows = std::min(job_.block, job_.rows - row0);
    for (int64_t k = 0; k < n; k++) {
      const Value& value = job_.values[k];
      if (value.once) continue;
      if (value.direct) data_[k] = reinterpret_cast<float*>(value.base) + row0 * value.inner;
      else gather_rows(k, row0, rows);
      if (value.direct) prefetch(data_[k] + rows * value.inner, std::min(rows, job_.rows - row0 - rows) * value.inner);
    }
    for (int64_t k = 0; k < job_.header->n_steps; k++) {
      const Value& value = job_.values[n + k];
      if (value.direct) data_[n + k] = reinterpret_cast<float*>(value.base) + row0 * value.inner;
      if (!value.once) run_step(k, rows);
      else if (value.direct) run_step(k, rows);
    }
    for (int64_t k = 0; k < job_.header->n_outputs; k++) {
      const Output& output = job_.outputs[k];
      if (output.dtype == kDtypeFloat) continue;
      const int64_t inner = job_.values[output.value].inner;
      const float* from = data_[output.value];
      bool* to = reinterpret_cast<bool*>(job_.results[k]) + row0 * inner;
      for (int64_t i = 0; i < rows * inner; i++) to[i] = from[i] != 0;
    }
  }

 private:
  static std::vector<float*>& pointers() {
    thread_local std::vector<float*> memory;
    return memory;
  }

  // What the next block reads, while this one computes: a block is too short for the hardware to run ahead.
  static void prefetch(const float* from, int64_t n) {
    for (int64_t i = 0; i < std::min(n, kPrefetchFloats); i += 16) __builtin_prefetch(from + i);
  }

  void spread_constants(int64_t k) {
    const Step& step = job_.steps[k];
    for (int c = 0; c < 3; c++) {
      if (step.operands[c] >= 0) continue;
      std::fill_n(constant(k, c), kConstantLanes, float(step.constants[c]));
    }
  }

  float* constant(int64_t k, int c) const { return constants_ + (k * 3 + c) * kConstantLanes; }

  void run_step(int64_t k, int64_t rows) {
    const Step& step = job_.steps[k];
    const Value& value = job_.values[job_.header->n_inputs + k];
    float* to = data_[job_.header->n_inputs + k];
    const int64_t n = (value.by_row ? rows : 1) * value.inner;
    if (step.op == kExpand) return expand(step, value, to, rows);
    if (step.op >= kSum) return reduce(step, value, to, rows);
    Block operands[3];
    for (int c = 0; c < 3; c++)
      operands[c] = step.operands[c] < 0 ? Block{constant(k, c), 0} : Block{data_[step.operands[c]], -1};
    job_.kernels->elementwise(step.op, to, operands, n);
  }

  void expand(const Step& step, const Value& value, float* to, int64_t rows) {
    const Value& source = job_.values[step.operands[0]];
    Loops loops{0, {}, {}};
    if (value.by_row) {
      loops.sizes[0] = rows;
      loops.strides[0] = source.by_row ? source.inner : 0;
      loops.depth = 1;
    }
    append(loops, value.loops);
    job_.kernels->gather(to, reinterpret_cast<const char*>(data_[step.operands[0]]), kDtypeFloat, loops);
  }

  static void append(Loops& loops, const Loops& more) {
    for (int k = 0; k < more.depth; k++) loops.add(more.sizes[k], more.strides[k]);
  }

  // The reduced axes lie next to each other: encode.py makes a step for each run of them.
  void reduce(const Step& step, const Value& value, float* to, int64_t rows) {
    const int64_t mask = job_.mask_of(step.operands[0]), axes = job_.header->axes;
    const int64_t first = __builtin_ctzll(uint64_t(mask & ~step.mask));
    const int64_t before = job_.count(step.mask, job_.outer, std::max(first, job_.outer));
    const int64_t n = job_.count(mask & ~step.mask, 0, axes);
    const int64_t after = before ? value.inner / before : 0;
    job_.kernels->reduce(step.op, to, data_[step.operands[0]], (value.by_row ? rows : 1) * before, n, after);
  }

  // An input that is not dense: over runs of the last outer axis, along which its rows are one stride apart.
  void gather_rows(int64_t k, int64_t row0, int64_t rows) {
    const Value& value = job_.values[k];
    const Input& input = job_.inputs[k];
    const int64_t* strides = job_.tensors[k]->strides;
    const auto stride_of = [&](int64_t axis) { return input.dim_of[axis] < 0 ? 0 : strides[input.dim_of[axis]]; };
    const int64_t size = value.dtype == kDtypeFloat || value.dtype == 3 ? 4 : value.dtype == kDtypeInt64 ? 8 : 1;
    const int64_t last = job_.outer - 1, length = job_.sizes[last];
    for (int64_t row = row0; row < row0 + rows;) {
      int64_t offset = 0, rest = row;
      for (int64_t axis = last; axis >= 0; axis--) {
        offset += rest % job_.sizes[axis] * stride_of(axis);
        rest /= job_.sizes[axis];
      }
      const int64_t count = std::min(length - row % length, row0 + rows - row);
      Loops loops{1, {count}, {stride_of(last)}};
      append(loops, value.loops);
      job_.kernels->gather(data_[k] + (row - row0) * value.inner, value.base + offset * size, value.dtype, loops);
      row += count;
    }
  }

  const Job& job_;
  std::vector<float*>& data_;
  float* constants_;
};

}  // namespace fxopt
