// The records of a plan (encode.py writes them), and one instruction set's kernels.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

constexpr int64_t kVersion = 0x46584F500102;
constexpr int kMostAxes = 6, kMostOperands = 3;

// In the order of plan.py's OPS.
enum Op : int64_t {
  kCopy, kNeg, kAbs, kExp, kLog, kLog1p, kTanh, kSigmoid, kSilu, kGelu, kErf, kRelu, kSqrt, kRsqrt, kReciprocal,
  kSquare, kSoftplus, kNot, kIsNan,
  kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kClampMin, kClampMax, kLt, kLe, kGt, kGe, kEq, kNe, kAnd, kOr, kXor,
  kLeakyRelu, kPrelu,
  kWhere, kFma,
  kSum, kMean, kAmax, kAmin, kPeak,
  kExpand,
};

struct Header {
  int64_t version, axes, outer, n_inputs, n_steps, n_outputs, n_slots, unused;
};

struct Input {
  int64_t mask, dims, dim_of[kMostAxes];  // by axis; -1: none
};

struct Step {
  int64_t op, n_operands, mask, slot, operands[kMostOperands];  // operand -1: a constant
  double constants[kMostOperands];
};

struct Output {
  int64_t value, dtype, dims, axes[kMostAxes];  // by dim; -1: a size of 1
};

// A block of floats, or (advance 0) one vector of a constant. Of the rest nothing is read.
struct Block {
  const float* data;
  int64_t advance;  // -1, a mask of the position, or 0
};

// Nested loops from a strided source to a dense block.
struct Loops {
  int depth;
  int64_t sizes[kMostAxes + 1], strides[kMostAxes + 1];

  // One loop more, inside of the others; as part of the last one where that is the same.
  [[gnu::always_inline]] void add(int64_t size, int64_t stride) {
    if (size == 1) return;
    if (depth > 0 && strides[depth - 1] == stride * size) {
      sizes[depth - 1] *= size;
      strides[depth - 1] = stride;
      return;
    }
    sizes[depth] = size;
    strides[depth++] = stride;
  }
};

struct Kernels {
  void (*elementwise)(int64_t op, float* to, const Block* operands, int64_t n);
  // [outer, n, inner] to [outer, inner]
  void (*reduce)(int64_t op, float* to, const float* from, int64_t outer, int64_t n, int64_t inner);
  void (*gather)(float* to, const char* from, int32_t dtype, const Loops& loops);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
