// From strided or broadcast memory of any element type to a dense block of floats.
#pragma once
#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

inline void fill(float* to, float x, int64_t n) {
  const Floats v = splat(x);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, v);
  if (i < n) store(to + i, v, int(n - i));
}

template <class T>
inline void copy(float* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = float(from[i]);
}

// The two innermost loops.
template <class T>
float* gather_plane(float* to, const T* from, const int64_t* sizes, const int64_t* strides) {
  const int64_t rows = sizes[0], n = sizes[1], stride = strides[1];
  for (int64_t row = 0; row < rows; row++, from += strides[0], to += n) {
    if (stride == 0) fill(to, float(*from), n);
    else if (stride == 1) copy(to, from, n);
    else for (int64_t i = 0; i < n; i++) to[i] = float(from[i * stride]);
  }
  return to;
}

template <class T>
float* gather_from(float* to, const T* from, int depth, const int64_t* sizes, const int64_t* strides) {
  if (depth == 2) return gather_plane(to, from, sizes, strides);
  for (int64_t i = 0; i < sizes[0]; i++, from += strides[0]) to = gather_from(to, from, depth - 1, sizes + 1, strides + 1);
  return to;
}

template <class T>
void gather_as(float* to, const char* from, const Loops& loops) {
  Loops two{2, {1, 1}, {0, 0}};  // at least two loops, the outer ones of one turn
  if (loops.depth < 2) {
    if (loops.depth) two.sizes[1] = loops.sizes[0], two.strides[1] = loops.strides[0];
    gather_plane(to, reinterpret_cast<const T*>(from), two.sizes, two.strides);
    return;
  }
  gather_from(to, reinterpret_cast<const T*>(from), loops.depth, loops.sizes, loops.strides);
}

static void gather(float* to, const char* from, int32_t dtype, const Loops& loops) {
  for (int k = 0; k < loops.depth; k++)
    if (loops.sizes[k] == 0) return;  // an empty tensor has no memory
  switch (dtype) {
    case 0: case 11: return gather_as<uint8_t>(to, from, loops);
    case 3: return gather_as<int32_t>(to, from, loops);
    case 4: return gather_as<int64_t>(to, from, loops);
    default: return gather_as<float>(to, from, loops);
  }
}

}  // namespace fxopt::FXOPT_ISA
