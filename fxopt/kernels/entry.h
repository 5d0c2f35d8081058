// How both ways into a kernel, the dispatcher's (dispatched.h) and Python's (entry.cpp), ask for one call.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "refused.h"

namespace fxopt {

constexpr int kMostDevices = 128;  // torch has 120

// c10::ScalarType, by the numbers that torch's stable ABI fixes.
enum : int32_t { kDtypeInt64 = 4, kDtypeFloat = 6, kDtypeDouble = 7, kDtypeBool = 11, kDtypeBFloat16 = 15 };

// A tensor as it lies in memory, borrowed. dim -1: None.
struct Array {
  char* data;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dim, dtype;
  bool is_none() const { return dim < 0; }
};

struct Request {
  const Array* operands;  // of all arguments, one after the other
  const int64_t* counts;    // how many of them each argument has: a list, or one
  int64_t n_operands, n_arguments;
  const int64_t* words;  // the plan
  int64_t n_words;
  char* (*allocate)(void* context, int32_t dim, const int64_t* sizes, int32_t dtype);  // the next output, contiguous
  void* context;

  const Array* argument(int64_t number) const {
    const Array* first = operands;
    for (int64_t k = 0; k < number; k++) first += counts[k];
    return first;
  }
  char* output(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return allocate(context, int32_t(sizes.size()), sizes.begin(), dtype);
  }
  float* floats(std::initializer_list<int64_t> sizes) const { return reinterpret_cast<float*>(output(sizes, kDtypeFloat)); }
};

}  // namespace fxopt
