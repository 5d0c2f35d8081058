// From strided or broadcast memory of any element type to a dense block of floats.
#pragma once
#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

inline void fill(float* to, float x, int64_t n) {
  const Floats v = splat(x);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, v);
  for (; i < n; i++) to[i] = x;
}

inline void copy(float* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = from[i];
}

template <class T>
inline void copy(float* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = float(from[i]);
}

template <class T>
float* gather_from(float* to, const T* from, int depth, const int64_t* sizes, const int64_t* strides) {
  if (depth == 0) {
    *to = float(*from);
    return to + 1;
  }
  const int64_t n = sizes[0], stride = strides[0];
  if (depth > 1) {
    for (int64_t i = 0; i < n; i++) to = gather_from(to, from + i * stride, depth - 1, sizes + 1, strides + 1);
    return to;
  }
  if (n == 0) return to;
  if (stride == 1) copy(to, from, n);
  else if (stride == 0) fill(to, float(*from), n);
  else for (int64_t i = 0; i < n; i++) to[i] = float(from[i * stride]);
  return to + n;
}

template <class T>
void gather_as(float* to, const char* from, const Loops& loops) {
  gather_from(to, reinterpret_cast<const T*>(from), loops.depth, loops.sizes, loops.strides);
}

static void gather(float* to, const char* from, int32_t dtype, const Loops& loops) {
  switch (dtype) {
    case 0: case 11: return gather_as<uint8_t>(to, from, loops);
    case 3: return gather_as<int32_t>(to, from, loops);
    case 4: return gather_as<int64_t>(to, from, loops);
    default: return gather_as<float>(to, from, loops);
  }
}

}  // namespace fxopt::FXOPT_ISA
