// A tower program: steps on rows, from inputs through buffers to outputs (plan.py has the words).
#pragma once
#include <vector>

#include "../simd/cpu.h"
#include "../entry.h"

namespace fxopt::towers {

enum Op : int64_t { kLinear = 0, kMixture = 1, kCopy = 2, kProduct = 3 };
enum Activation : int64_t { kNoActivation = 0, kRelu = 1, kSigmoid = 2, kTanh = 3 };

constexpr int64_t kVersion = 0x4658544F0002;

struct BufferPlan { int64_t width, inner, is_output; };  // inner > 0: the output is [rows, inner, width / inner]

// Columns of an input (place >= 0: of that index of its second last dim) or of a buffer.
struct Source { int64_t tensor, place, start, is_input; };

struct Step { int64_t level, op, buffer, column, width; };
struct LinearStep : Step { Source x; int64_t weight, bias, activation; };
struct MixtureStep : Step { Source gate; int64_t softmax, count; };  // and a Source for each expert
struct CopyStep : Step { Source x; };
struct ProductStep : Step { Source left, right; };

inline const Source* experts_of(const MixtureStep& mixture) { return reinterpret_cast<const Source*>(&mixture + 1); }

struct Buffer {
  char* output;   // null: scratch
  int64_t width;
  int64_t before;  // widths of the scratch buffers in front of this one
};

// An input as rows: data of row r is data + offset(r). Where leading dims do not collapse, every row is looked up.
struct Input {
  const Array* operand;
  int64_t row_stride, inner_stride, element_stride;  // in elements; of the second last dim; of the last
  bool inner;     // has a second last dim that is no row
  bool collapses;
};

struct Call {
  const Array* operands;
  std::vector<Input> inputs;
  std::vector<Buffer> buffers;
  std::vector<const Step*> steps;
  int64_t n_weights, n_biases;
  int64_t rows;
  int64_t scratch_width;  // of all scratch buffers
  const Array& weight(int64_t index) const { return operands[int64_t(inputs.size()) + index]; }
  const Array& bias(int64_t index) const { return weight(n_weights + index); }
};

// Rows [row0, row1), whose scratch buffers lie at `scratch`, each [row1 - row0, width].
struct Block {
  int64_t row0, row1;
  char* scratch;
};

// One step for a block of rows; of a linear the columns [n0, n1).
struct Kernels {
  void (*run)(const Call&, const Step&, const Block&, int64_t n0, int64_t n1);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt::towers
