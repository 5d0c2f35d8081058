// How a kernel turns a request down.
#pragma once
#include <cstdarg>
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

}  // namespace fxopt
