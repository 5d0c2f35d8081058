// What a library of kernels shows: C functions, which throw nothing.
#pragma once
#include <cstdio>
#include <exception>

#define FXOPT_EXPORT extern "C" __attribute__((visibility("default")))

namespace fxopt {

// Whether `work` was done. False: it was refused, and `text` (256 bytes) says why.
template <class Work>
inline bool done(char* text, const Work& work) {
  try {
    work();
    return true;
  } catch (const std::exception& error) {
    snprintf(text, 256, "%s", error.what());
    return false;
  }
}

}  // namespace fxopt
