// A tower program: steps on rows, from inputs through buffers to outputs (plan.py has the words).
#pragma once
#include <vector>

#include "../simd/cpu.h"
#include "../entry.h"

namespace fxopt::towers {

enum Op : int64_t { kLinear = 0, kMixture = 1, kCopy = 2, kProduct = 3 };
enum Activation : int64_t { kNoActivation = 0, kRelu = 1, kSigmoid = 2, kTanh = 3 };

struct Header { int64_t version, n_inputs, n_weights, n_biases, n_buffers, n_steps; };
constexpr int64_t kVersion = 1;

struct BufferPlan { int64_t is_output, width, inner; };  // inner > 0: the output is [rows, inner, width / inner]

// Columns of an input (tensor >= 0; place >= 0: of that index of its second last dim) or of buffer -1 - tensor.
struct Source { int64_t tensor, place, start; };

struct Step { int64_t op, length, level, buffer, column; };  // what it writes, and how many words it has
struct LinearStep { Step step; Source x; int64_t weight, bias, width, activation; };
struct CopyStep { Step step; Source x; int64_t width; };
struct ProductStep { Step step; Source left, right; int64_t width; };
struct MixtureStep { Step step; Source gate; int64_t count, width, softmax; };  // and a Source for each expert

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
  Header header;
  std::vector<Input> inputs;
  std::vector<Buffer> buffers;
  std::vector<const Step*> steps;
  int64_t rows;
  int64_t scratch_width;  // of all scratch buffers
  const Array& weight(int64_t index) const { return operands[header.n_inputs + index]; }
  const Array& bias(int64_t index) const { return operands[header.n_inputs + header.n_weights + index]; }
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
