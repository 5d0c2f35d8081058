// Element types and their conversions, as torch does them on this CPU. Compiled once per instruction set.
#pragma once
#if FXOPT_VECTOR_BYTES > 16
#include <immintrin.h>
#endif
#include <cmath>
#include <cstdint>
#include <cstring>

#include "layout.h"

namespace fxopt::FXOPT_ISA {

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

template <class T, class S>
inline T bit_cast(S s) {
  static_assert(sizeof(T) == sizeof(S));
  T t;
  memcpy(&t, &s, sizeof t);
  return t;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
inline float widen(Half x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact
    float magnitude = float(fraction) * 0x1p-24f;
    return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign);
  }
  return bit_cast<float>(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}

inline BFloat16 to_bfloat16(float x) {
  if (std::isnan(x)) return {0x7fc0};
  uint32_t bits = bit_cast<uint32_t>(x);
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline Half to_half(float x) {  // round to nearest even
  uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x47800000) return {uint16_t(sign | 0x7c00)};
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves fraction * 2^24 in the low bits, rounded
    float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000))};
  }
  return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13))};
}

inline void narrow(double x, float& out) { out = float(x); }
inline void narrow(double x, double& out) { out = x; }
inline void narrow(double x, Half& out) { out = to_half(float(x)); }
inline void narrow(double x, BFloat16& out) { out = to_bfloat16(float(x)); }
inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, double& out) { out = x; }
inline void narrow(float x, Half& out) { out = to_half(x); }
inline void narrow(float x, BFloat16& out) { out = to_bfloat16(x); }

template <class T, class A>
inline void widen_all(const T* from, int64_t n, A* to) {
  int64_t k = 0;
#if FXOPT_VECTOR_BYTES >= 32
  if constexpr (__is_same(T, Half) && __is_same(A, float))
    for (; k + 8 <= n; k += 8) _mm256_storeu_ps(to + k, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k))));
#endif
  for (; k < n; k++) to[k] = A(widen(from[k]));
}

// Truncation as x86 converts: NaN and what does not fit give the smallest integer.
template <class F>
inline int64_t truncate(F x, int dtype) {
  switch (dtype) {
    case kBool: return x != 0;
    case kInt64: case kUInt8: return int64_t(x);
    default: return int32_t(x);  // int8 and int16 narrow from int32, as compilers do
  }
}

}  // namespace fxopt::FXOPT_ISA
