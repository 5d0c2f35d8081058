// Numbers of 8 bits, made floats in registers.
#pragma once
#if FXOPT_VECTOR_BYTES > 16
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>

namespace fxopt::FXOPT_ISA {

// As many codes as V holds floats.
template <class V>
inline V load_codes(const char* from) {
  constexpr int n = sizeof(V) / sizeof(float);
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (n == 16) return (V)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
#if FXOPT_VECTOR_BYTES >= 32
  if constexpr (n == 8) return (V)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
  typedef uint8_t Codes __attribute__((vector_size(n)));
  Codes codes;
  memcpy(&codes, from, n);
  return __builtin_convertvector(codes, V);
}

}  // namespace fxopt::FXOPT_ISA
