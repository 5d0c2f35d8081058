// How both ways in, the dispatcher's (cpu.cpp) and Python's (entry.cpp), ask for one call.
#pragma once
#include "layout.h"

namespace fxopt {

constexpr int kMostDevices = 128;  // torch has 120

struct Request {
  const Array* tensors;
  const Array* tables;
  int64_t n_tensors, n_tables;
  const int64_t* words;
  int64_t n_words;
  char* (*allocate)(void* context, int64_t rows, int64_t width, int32_t dtype);  // the next output, contiguous
  void* context;
};

}  // namespace fxopt
