// Squares of floats turned over in registers.
#pragma once
#include "vector.h"

namespace fxopt::FXOPT_ISA {

#ifdef __clang__
#define FXOPT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FXOPT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})  // GCC knows the other one from 12 on
#endif

// The lower and the upper halves of two vectors, lane by lane in turn.
#if FXOPT_VECTOR_BYTES == 64
inline Floats zip_low(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline Floats zip_high(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
#elif FXOPT_VECTOR_BYTES == 32
inline Floats zip_low(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Floats zip_high(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
inline Floats zip_low(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 0, 4, 1, 5); }
inline Floats zip_high(Floats a, Floats b) { return FXOPT_SHUFFLE(a, b, 2, 6, 3, 7); }
#endif

// v[k][l] becomes v[l][k]. Zipping the halves moves the first bit of (row, lane) behind the last one, so as many zips
// as a row number has bits exchange rows and lanes.
[[gnu::always_inline]] inline void transpose(Floats (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Floats zipped[kLanes];
#pragma GCC unroll 8
    for (int k = 0; k < kLanes / 2; k++) {
      zipped[2 * k] = zip_low(v[k], v[k + kLanes / 2]);
      zipped[2 * k + 1] = zip_high(v[k], v[k + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; k++) v[k] = zipped[k];
  }
}

}  // namespace fxopt::FXOPT_ISA
