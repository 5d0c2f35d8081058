// What one call hands to the kernels.
#pragma once
#include <cstdint>

#include "../simd/cpu.h"

namespace fxopt {

// int32 or int64 numbers that lie side by side.
struct Integers {
  const char* data;
  bool wide;
  int64_t operator[](int64_t k) const {
    return wide ? reinterpret_cast<const int64_t*>(data)[k] : reinterpret_cast<const int32_t*>(data)[k];
  }
};

// Bytes in front of a row's numbers: the scale and the offset of codes.
constexpr int64_t header(int bits) { return bits > 8 ? 0 : 4; }

// Bags [begin, end) of one feature: ids [offsets[b], offsets[b + 1]) of a table. Its rows are numbers of 32 or 16 bits, or
// their scale and offset, float16 each, and then codes of 8, 4 or 2 bits. Not pooled: a row of the output for each id.
struct Bags {
  const char* table;
  int bits;
  int64_t n_rows, row_stride, dim;
  Integers ids, offsets;
  int64_t n_ids, begin, end;
  const float* weights;  // of ids, or null
  bool pooled, mean;
  float* out;  // of bag 0, or of id 0
  int64_t out_stride;
};

// False where an id is not in the table, or offsets do not grow.
struct Kernels {
  bool (*look_up)(const Bags&);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
