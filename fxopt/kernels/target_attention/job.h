// One call of fxopt::target_attention as plain data: what cpu.cpp prepares and tile.h runs, whatever the CPU.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt::target {

// Every vector of channels is padded to whole vectors of the widest CPU.
constexpr int64_t kPad = 16;
[[gnu::always_inline]] inline int64_t padded(int64_t channels) { return (channels + kPad - 1) / kPad * kPad; }

constexpr int kMostRegisters = 12;

// Operands of an instruction: a register, or from these numbers on a parameter, a constant.
constexpr int64_t kParameter = 100, kConstant = 10000;

// A view of an array. Inlined wherever it is used: a shared copy might be one compiled for a newer CPU.
template <class T> struct List {
  const T* items = nullptr;
  int64_t size = 0;
  [[gnu::always_inline]] const T* begin() const { return items; }
  [[gnu::always_inline]] const T* end() const { return items + size; }
  [[gnu::always_inline]] const T& operator[](int64_t index) const { return items[index]; }
};

enum Op : int64_t {
  kLinear, kBatchNorm,                            // dst, source, index of the weight or norm
  kAdd, kSub, kMul, kDiv, kMaximum, kMinimum,     // dst, left, right
  kNeg, kExp, kSigmoid, kTanh, kSilu, kPRelu,     // dst, source; kPRelu with the slope as its right operand
};

enum TailOp : int64_t { kScale, kShift, kFill, kFillWhere, kTimesMask, kPlusMask, kSoftmax };

struct Instruction { int64_t op, dst, left, right; };

struct TailStep { int64_t op, mask; float value; };

struct Source { const float* data; int64_t row, position, width; };  // strides in floats; channels are contiguous

struct Mask { const char* data; int64_t row, position; bool is_bool; };  // strides in elements

// A matrix as [K, padded N], so that a vector holds neighbouring outputs.
struct Packed { const float* data; int64_t K, N; };

struct Product { int64_t row; Packed weight; };

// What one source of positions is multiplied with: shared by all rows, plus a diagonal of a row's own per product.
struct Keys { int64_t position; Packed shared; List<Product> products; };

struct Job {
  int64_t B, T, width, widest;  // channels of the first layer, and the most of any
  List<Source> rows, positions;
  List<Mask> masks;
  List<Product> row_weights;
  List<Keys> keys;
  const float* bias;
  List<Packed> weights;      // of the layers behind the first
  List<const float*> biases, scales, shifts, parameters, constants;
  List<Instruction> instructions;
  int64_t score;  // the register that holds the score in its first channel
  List<TailStep> tail;
  int64_t values;  // which positions are summed, weighted by the scores; -1: the scores are the result
  float* out;
  char* (*scratch)(size_t bytes);  // of this thread, aligned to a cache line
};

using Run = void (*)(const Job&, int64_t row0, int64_t row1);

FXOPT_IN_EACH(const Run run)

}  // namespace fxopt::target
