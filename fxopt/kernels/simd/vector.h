// Arithmetic of vectors of floats. Arithmetic and comparisons are operators (GCC's vector extension); a comparison gives an
// Ints of 0 and -1, and `mask ? a : b` selects by lane.
#pragma once
#include "lanes.h"

namespace fxopt::FXOPT_ISA {

inline Ints bits(Floats x) { return (Ints)x; }
inline Floats from_bits(Ints x) { return (Floats)x; }
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
