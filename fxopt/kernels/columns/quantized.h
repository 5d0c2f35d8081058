// Rows in 8 bits, as quantized.py lays them out, and in bfloat16, made floats in registers.
#pragma once
#include "../simd/codes.h"
#include "job.h"

namespace fxopt::FXOPT_ISA {

// As many bfloat16s as V holds floats.
template <class V>
inline V load_bfloat16(const char* from) {
  constexpr int n = sizeof(V) / sizeof(float);
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (n == 16) return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#endif
#if FXOPT_VECTOR_BYTES >= 32
  if constexpr (n == 8) return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#endif
  V values;
  for (int k = 0; k < n; k++) values[k] = widen(reinterpret_cast<const BFloat16*>(from)[k]);
  return values;
}

inline Quantization quantization_of(const char* row, int64_t dim) {
  Quantization found;
  memcpy(&found, row + dim, sizeof found);
  return found;
}

template <class A>
inline void widen_codes(const Table& table, int64_t id, A* out) {
  typedef float V __attribute__((vector_size(FXOPT_VECTOR_BYTES)));
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  const char* row = table.data + id * table.row_stride;
  const Quantization by = quantization_of(row, table.dim);
  int64_t k = 0;
  if constexpr (__is_same(A, float)) {
    for (; k + kLanes <= table.dim; k += kLanes) {
      const V values = load_codes<V>(row + k) * by.scale + by.offset;
      memcpy(out + k, &values, sizeof values);
    }
  }
  for (; k < table.dim; k++) out[k] = float(uint8_t(row[k])) * by.scale + by.offset;
}

}  // namespace fxopt::FXOPT_ISA
