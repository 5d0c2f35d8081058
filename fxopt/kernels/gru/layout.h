// What one call hands to the kernels.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

// Some rows of a recurrence: their states behind each of `steps` steps, `units` numbers each.
struct Recurrence {
  const float* gates;  // of a step 3 * units, dense: reset, update, new
  int64_t gates_row, gates_step;
  const float* weight;  // [3 * units, units]
  int64_t weight_row;
  const float* bias;  // null: none
  float* states;  // of a row and a step `units`, dense
  int64_t states_step;
  int64_t rows, steps, units;
  // Of packed sequences, whose steps follow each other without gaps: how many rows each step has, no more than the one
  // before it, of which these rows begin at `first`. null: every step has all rows.
  const int64_t* batch_sizes = nullptr;
  int64_t first = 0;
  float* last = nullptr;  // of packed sequences [rows, units], dense
  const float* initial = nullptr;  // [rows, units], dense
  float* scratch = nullptr;  // of scratch_of(rows, units) numbers
};

// What the state gives to the gates of all rows, and the weights turned for the kernel.
inline int64_t scratch_of(int64_t rows, int64_t units) { return 3 * units * rows + (3 * units + 64) * units; }

struct Kernels {
  void (*recur)(const Recurrence&);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
