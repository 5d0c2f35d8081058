// What one call hands to the kernels: pairs of plain columns, whose rows are multiplied where they lie.
#pragma once
#include "../simd/cpu.h"
#include "../columns/call.h"

namespace fxopt {

constexpr int kPairs = 16;  // of a work item: 16 dot products are a cache line of a row

// Columns with the same ids are a group: those are made once.
struct Products {
  Call call;  // of 2 * pairs columns: pair p are columns p and pairs + p
  const int64_t *firsts, *groups;
  int64_t rows, pairs, dim;
  bool dots;
  float* out;            // [rows, pairs] where dots, else [rows, pairs * dim]
  int32_t* ids;          // [groups, rows of a block]
  uint64_t* largest;     // id of each group
  int64_t row0, stride;  // the block's first row, and how many it has
};

// False: not plain lookups, or an id outside its table.
struct ProductKernels {
  // The ids of a group in the block.
  bool (*find)(const Products&, int64_t group);
  // Rows [row0, row1) of the block, of pairs [first, last), at most kPairs.
  bool (*multiply)(const Products&, int64_t first, int64_t last, int64_t row0, int64_t row1);
};

FXOPT_IN_EACH(const ProductKernels products)

}  // namespace fxopt
