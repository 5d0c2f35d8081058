// How a kernel turns a request down.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace fxopt {

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

// Of one tensor. More than any memory holds, which only an expansion has: sizes below it can be padded and multiplied
// by small numbers; products of sizes of several tensors are for product().
constexpr int64_t kMostElements = int64_t(1) << 42;

inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result) || result > kMostElements) refused("fxopt: more numbers than a memory holds");
  return result;
}

}  // namespace fxopt
