// How both ways into a kernel, the dispatcher's (dispatched.h) and Python's (entry.cpp), ask for one call.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

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

// A request that does not fit its plan. Not torch's own check: that prints through a stream, which crashes where the
// compiler links the C++ library a second time.
[[noreturn]] [[gnu::format(printf, 1, 2)]] inline void refused(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw std::runtime_error(text);
}

}  // namespace fxopt
