// What one call hands to the kernels.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

// The k largest of n numbers, of each of `lists` lists: the first the largest, or, `placed`, in the order in which they lie.
struct Largest {
  const float* from;
  int64_t n, k, lists;
  int64_t step, list_step;  // in `from`: from number to number, from list to list
  float* to;
  int64_t to_step, to_list_step;
  bool placed;
};

struct Kernels {
  void (*largest)(const Largest&);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
