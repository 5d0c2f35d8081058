// What one call hands to the kernels: pairs of plain columns, whose rows are multiplied where they lie.
#pragma once
#include "../columns/call.h"

namespace fxopt {

constexpr int kPairs = 16;  // of a work item: 16 dot products are a cache line of a row

// Words in front of the columns' plan.
struct Setting {
  int64_t n_tensors, dots;  // the other operands are tables; dots: products are summed over their row
};

struct Products {
  Call call;  // of 2 * pairs columns: pair p are columns p and pairs + p
  int64_t rows, pairs, dim;
  bool dots;
  float* out;  // [rows, pairs] where dots, else [rows, pairs * dim]
};

struct ProductKernels {
  // Rows [row0, row1) of pairs [first, last), at most kPairs. False: not plain lookups, or an id outside its table.
  bool (*run)(const Products&, int64_t first, int64_t last, int64_t row0, int64_t row1);
};

namespace avx512 { extern const ProductKernels products; }
namespace avx2 { extern const ProductKernels products; }
namespace scalar { extern const ProductKernels products; }

}  // namespace fxopt
