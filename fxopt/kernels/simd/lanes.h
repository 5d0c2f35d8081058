// The lanes of a vector of floats, as wide as the instruction set that FXOPT_ISA names: 16, 8 or 4 (4: what every 64-bit
// CPU has), and how they come from memory and go there, some or all of them.
#pragma once
#if FXOPT_VECTOR_BYTES > 16
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>

namespace fxopt::FXOPT_ISA {

constexpr int kLanes = FXOPT_VECTOR_BYTES / 4;
typedef float Floats __attribute__((vector_size(FXOPT_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(FXOPT_VECTOR_BYTES)));

inline Floats splat(float x) { return x - Floats{}; }  // x - 0: exact, and keeps -0
inline Ints splat(int32_t x) { return x - Ints{}; }

// 0, 1, 2...
inline Ints lane_numbers() {
  Ints v;
  for (int k = 0; k < kLanes; k++) v[k] = k;
  return v;
}

template <class V>
inline V load_as(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }

inline void store(float* to, Floats v) { memcpy(to, &v, sizeof v); }

// The first n < kLanes lanes; the others are 0, and are not stored.
inline Floats load(const float* from, int n) {
#if FXOPT_VECTOR_BYTES == 64
  return (Floats)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from);
#elif FXOPT_VECTOR_BYTES == 32
  return (Floats)_mm256_maskload_ps(from, (__m256i)(lane_numbers() < n));
#else
  Floats v{};
  memcpy(&v, from, size_t(n) * sizeof(float));
  return v;
#endif
}

inline void store(float* to, Floats v, int n) {
#if FXOPT_VECTOR_BYTES == 64
  _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), (__m512)v);
#elif FXOPT_VECTOR_BYTES == 32
  _mm256_maskstore_ps(to, (__m256i)(lane_numbers() < n), (__m256)v);
#else
  memcpy(to, &v, size_t(n) * sizeof(float));
#endif
}

// The next lanes where `left` numbers are left: all of them, or the first ones.
inline Floats load_part(const float* from, int64_t left) { return left >= kLanes ? load(from) : load(from, int(left)); }
inline void store_part(float* to, Floats v, int64_t left) { left >= kLanes ? store(to, v) : store(to, v, int(left)); }

// A call of memcpy costs more than a few numbers.
inline void copy(float* to, const float* from, int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) store(to + k, load(from + k));
  if (k < n) store(to + k, load(from + k, int(n - k)), int(n - k));
}

}  // namespace fxopt::FXOPT_ISA
