// What one call hands to the kernels.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

// Some rows of a recurrence: their states behind each of `steps` steps, `units` numbers each.
struct Recurrence {
  const float* gates;  // of a step 3 * units, dense: reset, update, new
  int64_t gates_row, gates_step;
  const float* initial;  // [rows, units], dense
  const float* weight;  // [3 * units, units]
  int64_t weight_row;
  const float* bias;  // null: none
  float* states;  // of a row and a step `units`, dense
  int64_t states_step;
  int64_t rows, steps, units;
  float* scratch;  // of scratch_of(rows, units) numbers
};

// What the state gives to the gates of all rows, and the weights turned for the kernel.
inline int64_t scratch_of(int64_t rows, int64_t units) { return 3 * units * rows + (3 * units + 64) * units; }

struct Kernels {
  void (*recur)(const Recurrence&);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
