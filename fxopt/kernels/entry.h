// How both ways into a kernel, the dispatcher's (dispatched.h) and Python's (entry.cpp), ask for one call.
#pragma once
#include <cstdint>

#include "refused.h"

namespace fxopt {

// c10::ScalarType, by the numbers that torch's stable ABI fixes.
enum : int32_t { kDtypeInt64 = 4, kDtypeFloat = 6, kDtypeDouble = 7, kDtypeBFloat16 = 15 };

// A CPU tensor as it lies in memory. dim -1: None.
struct Operand {
  char* data;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dim, dtype;
  bool is_none() const { return dim < 0; }
};

struct Request {
  const Operand* operands;  // of all arguments, one after the other
  int64_t n_operands;
  const int64_t* words;  // the plan
  int64_t n_words;
  char* (*allocate)(void* context, int32_t dim, const int64_t* sizes, int32_t dtype);  // the next output, contiguous
  void* context;
};

}  // namespace fxopt
