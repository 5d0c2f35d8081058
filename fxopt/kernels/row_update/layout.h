// One optimizer's step on some rows of tables.
#pragma once
#include <cstdint>

namespace fxopt {

enum Kind : int64_t { kSgd, kRowwiseAdagrad, kAdam };  // op.py's Kind

// What a step takes besides tensors. rate: Adam's includes its first correction; gain: 1 - beta, from doubles; root: of
// the second correction.
template <class A>
struct Rates {
  A rate, eps, beta1, beta2, gain1, gain2, root;
};

// Everything is contiguous. A row whose gradient is zero everywhere stays as it is, and so does its state.
template <class A>
struct Rows {
  A *table, *first, *second;  // [R, dim]; state: sums [R], or both moments [R, dim]
  const int64_t* rows;        // [n], different ones but for those whose gradient is zero
  const A* grads;             // [n, dim]
  int64_t n, dim, table_rows;
};

}  // namespace fxopt
