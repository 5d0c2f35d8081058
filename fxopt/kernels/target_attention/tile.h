// Scores of target attention, a few positions at a time, through all layers while they are in the first-level cache.
#pragma once
#include "multiply.h"

namespace fxopt::target::FXOPT_ISA {

constexpr int64_t kTile = 48;  // positions at once

// What a thread works in.
struct Memory {
  explicit Memory(const Job& job) : ld(padded(job.widest)) {
    const int64_t tile = (kTile + kSlack) * ld;
    int64_t floats = tile * kMostRegisters + padded(job.width) + padded(job.T);
    for (const Keys& keys : job.keys) floats += keys.products.size ? keys.shared.K * padded(job.width) : 0;
    auto* at = reinterpret_cast<float*>(job.scratch(floats * 4 + job.T * 8));
    for (auto& registered : registers) registered = at, at += tile;
    bias = at, at += padded(job.width);
    scores = at, at += padded(job.T);
    own = at;
    valid = reinterpret_cast<int64_t*>(registers[0] + floats);
  }

  int64_t ld;
  float *registers[kMostRegisters], *bias, *scores, *own;
  int64_t* valid;
};

inline bool is_set(const Mask& mask, int64_t b, int64_t t) {
  const int64_t at = b * mask.row + t * mask.position;
  return mask.is_bool ? mask.data[at] != 0 : reinterpret_cast<const float*>(mask.data)[at] != 0;
}

inline float value_of(const Mask& mask, int64_t b, int64_t t) {
  const int64_t at = b * mask.row + t * mask.position;
  return mask.is_bool ? float(mask.data[at] != 0) : reinterpret_cast<const float*>(mask.data)[at];
}

// The positions whose score somebody reads: a fill in front of the softmax overwrites the others.
static int64_t find_valid(const Job& job, int64_t b, int64_t* valid) {
  const TailStep* fill = nullptr;
  for (const TailStep& step : job.tail) {
    if (step.op == kSoftmax) break;
    if (step.op == kFill || step.op == kFillWhere) { fill = &step; break; }
  }
  int64_t count = 0;
  for (int64_t t = 0; t < job.T; t++) {
    valid[count] = t;
    count += !fill || is_set(job.masks[fill->mask], b, t) == (fill->op == kFill);
  }
  return count;
}

// The part of the first layer that a row has once: its bias, and its weights for the keys.
static void prepare_row(const Job& job, Memory& memory, int64_t b) {
  const int64_t n = padded(job.width);
  std::memcpy(memory.bias, job.bias, n * 4);
  for (const Product& product : job.row_weights) {
    const Source& row = job.rows[product.row];
    for (int64_t d = 0; d < product.weight.K; d++) {
      const Floats x = splat(row.data[b * row.row + d]);
      const float* w = product.weight.data + d * n;
      for (int64_t h = 0; h < n; h += kLanes) store(memory.bias + h, fma(x, load(w + h), load(memory.bias + h)));
    }
  }
  float* own = memory.own;
  for (const Keys& keys : job.keys) {
    if (!keys.products.size) continue;
    const float* shared = keys.shared.data;
    for (const Product& product : keys.products) {
      const Source& row = job.rows[product.row];
      for (int64_t d = 0; d < keys.shared.K; d++) {
        const Floats x = splat(row.data[b * row.row + d]);
        for (int64_t h = d * n; h < (d + 1) * n; h += kLanes) store(own + h, fma(x, load(product.weight.data + h), load(shared + h)));
      }
      shared = own;
    }
    own += keys.shared.K * n;
  }
}

static void first_layer(const Job& job, Memory& memory, int64_t b, const int64_t* at, int64_t rows) {
  const float* pointers[kTile + kSlack];
  const float *own = memory.own, *start = memory.bias;
  for (const Keys& keys : job.keys) {
    const Source& source = job.positions[keys.position];
    for (int64_t r = 0; r < rows + kSlack; r++)
      pointers[r] = source.data + b * source.row + at[r < rows ? r : rows - 1] * source.position;
    const bool shared = !keys.products.size;
    multiply(pointers, rows, {shared ? keys.shared.data : own, keys.shared.K, job.width}, memory.registers[0], memory.ld, start);
    if (!shared) own += keys.shared.K * padded(job.width);
    start = nullptr;
  }
}

template <class F>
[[gnu::always_inline]] inline void each(const Job& job, Memory& memory, const Instruction& step, int64_t rows, int64_t n, F f) {
  const auto operand = [&](int64_t index, int64_t& ld) -> const float* {
    ld = index < kParameter ? memory.ld : 0;
    if (index >= kConstant) return job.constants[index - kConstant];
    return index >= kParameter ? job.parameters[index - kParameter] : memory.registers[index];
  };
  int64_t left_ld, right_ld;
  const float *left = operand(step.left, left_ld), *right = operand(step.right, right_ld);
  float* out = memory.registers[step.dst];
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < n; h += kLanes)
      store(out + r * memory.ld + h, f(load(left + r * left_ld + h), load(right + r * right_ld + h), h));
}

static void run_step(const Job& job, Memory& memory, const Instruction& step, int64_t rows, int64_t n) {
  const auto apply = [&](auto f) { each(job, memory, step, rows, n, f); };
  switch (step.op) {
    case kAdd: return apply([](Floats a, Floats b, int64_t) { return a + b; });
    case kSub: return apply([](Floats a, Floats b, int64_t) { return a - b; });
    case kMul: return apply([](Floats a, Floats b, int64_t) { return a * b; });
    case kDiv: return apply([](Floats a, Floats b, int64_t) { return a / b; });
    case kMaximum: return apply([](Floats a, Floats b, int64_t) { return maximum(a, b); });
    case kMinimum: return apply([](Floats a, Floats b, int64_t) { return minimum(a, b); });
    case kNeg: return apply([](Floats a, Floats, int64_t) { return -a; });
    case kExp: return apply([](Floats a, Floats, int64_t) { return exp(a); });
    case kSigmoid: return apply([](Floats a, Floats, int64_t) { return sigmoid(a); });
    case kTanh: return apply([](Floats a, Floats, int64_t) { return tanh(a); });
    case kSilu: return apply([](Floats a, Floats, int64_t) { return silu(a); });
    case kPRelu: return apply([](Floats a, Floats b, int64_t) { return a > 0.0f ? a : b * a; });
    case kBatchNorm: {
      const float *scale = job.scales[step.right], *shift = job.shifts[step.right];
      Instruction unary = step;
      unary.right = step.left;
      return each(job, memory, unary, rows, n, [=](Floats a, Floats, int64_t h) { return fma(a, load(scale + h), load(shift + h)); });
    }
  }
}

// Scores of the positions at[0 .. rows), rows <= kTile.
static void score(const Job& job, Memory& memory, int64_t b, const int64_t* at, int64_t rows) {
  first_layer(job, memory, b, at, rows);
  int64_t n = padded(job.width);
  for (const Instruction& step : job.instructions) {
    if (step.op != kLinear) {
      run_step(job, memory, step, rows, n);
      continue;
    }
    const float* pointers[kTile + kSlack];
    for (int64_t r = 0; r < rows + kSlack; r++) pointers[r] = memory.registers[step.left] + (r < rows ? r : rows - 1) * memory.ld;
    const Packed& weight = job.weights[step.right];
    multiply(pointers, rows, weight, memory.registers[step.dst], memory.ld, job.biases[step.right]);
    n = padded(weight.N);
  }
  for (int64_t r = 0; r < rows; r++) memory.scores[at[r]] = memory.registers[job.score][r * memory.ld];
}

static void run_tail(const Job& job, float* scores, int64_t b) {
  for (const TailStep& step : job.tail) {
    const Mask* mask = step.mask >= 0 ? &job.masks[step.mask] : nullptr;
    for (int64_t t = 0; t < job.T && step.op != kSoftmax; t++) switch (step.op) {
      case kScale: scores[t] *= step.value; break;
      case kShift: scores[t] += step.value; break;
      case kFill: scores[t] = is_set(*mask, b, t) ? scores[t] : step.value; break;
      case kFillWhere: scores[t] = is_set(*mask, b, t) ? step.value : scores[t]; break;
      case kTimesMask: scores[t] *= value_of(*mask, b, t); break;
      case kPlusMask: scores[t] += value_of(*mask, b, t); break;
    }
    if (step.op == kSoftmax && job.T) pad_for_softmax(scores, job.T), softmax(scores, job.T);
  }
}

static void weighted_sum(const Job& job, const float* scores, int64_t b) {
  const Source& values = job.positions[job.values];
  float* out = job.out + b * values.width;
  std::memset(out, 0, values.width * 4);
  const float* x = values.data + b * values.row;
  for (int64_t t = 0; t < job.T; t++, x += values.position) {
    int64_t d = 0;
    for (; d + kLanes <= values.width; d += kLanes) store(out + d, fma(splat(scores[t]), load(x + d), load(out + d)));
    for (; d < values.width; d++) out[d] += scores[t] * x[d];
  }
}

static void run_rows(const Job& job, int64_t row0, int64_t row1) {
  Memory memory(job);
  for (int64_t b = row0; b < row1; b++) {
    const int64_t count = find_valid(job, b, memory.valid);
    if (count) prepare_row(job, memory, b);
    if (count < job.T) std::memset(memory.scores, 0, job.T * 4);
    for (int64_t t = 0; t < count; t += kTile) score(job, memory, b, memory.valid + t, count - t < kTile ? count - t : kTile);
    run_tail(job, memory.scores, b);
    if (job.values >= 0) weighted_sum(job, memory.scores, b);
    else std::memcpy(job.out + b * job.T, memory.scores, job.T * 4);
  }
}

extern const Run run = run_rows;

}  // namespace fxopt::target::FXOPT_ISA
