// Vectors of floats, as wide as the instruction set that FXOPT_ISA names: 16, 8 or 4 lanes (4: what every 64-bit CPU
// has). Arithmetic and comparisons are operators (GCC's vector extension); a comparison gives an Ints of 0 and -1,
// and `mask ? a : b` selects by lane.
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

inline Floats load(const float* from) {
  Floats v;
  memcpy(&v, from, sizeof v);
  return v;
}

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

inline Ints bits(Floats x) { return (Ints)x; }
inline Floats from_bits(Ints x) { return (Floats)x; }
inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }  // truncates
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

inline Floats fma(Floats a, Floats b, Floats c) {
#if FXOPT_VECTOR_BYTES == 64
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FXOPT_VECTOR_BYTES == 32
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;  // rounds twice
#endif
}

inline Floats sqrt(Floats x) {
#if FXOPT_VECTOR_BYTES == 64
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif FXOPT_VECTOR_BYTES == 32
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int k = 0; k < kLanes; k++) x[k] = __builtin_sqrtf(x[k]);
  return x;
#endif
}

inline Floats abs(Floats x) { return from_bits(bits(x) & 0x7fffffff); }
inline Floats copy_sign(Floats magnitude, Floats sign) {
  return from_bits((bits(magnitude) & 0x7fffffff) | (bits(sign) & int32_t(0x80000000)));
}

// As torch: a NaN in either argument is the result; of zeros it is a, so that clamp(-0, 0) keeps its sign.
inline Floats maximum(Floats a, Floats b) { return ((a < b) | (b != b)) ? b : a; }
inline Floats minimum(Floats a, Floats b) { return ((a > b) | (b != b)) ? b : a; }

inline float sum(Floats v) {
#if FXOPT_VECTOR_BYTES == 64
  return _mm512_reduce_add_ps((__m512)v);
#elif FXOPT_VECTOR_BYTES == 32
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
  float total[kLanes];
  memcpy(total, &v, sizeof v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int k = 0; k < half; k++) total[k] += total[k + half];
  return total[0];
#endif
}

// The largest lane; NaN if one is.
inline float largest(Floats v) {
#if FXOPT_VECTOR_BYTES == 64
  if (_mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q)) return __builtin_nanf("");
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lanes[kLanes];
  memcpy(lanes, &v, sizeof v);
  float most = lanes[0];
  for (int k = 1; k < kLanes; k++) most = lanes[k] > most || lanes[k] != lanes[k] ? lanes[k] : most;
  return most;
#endif
}

}  // namespace fxopt::FXOPT_ISA
