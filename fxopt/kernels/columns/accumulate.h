// Adds table rows into an accumulator, in vectors that stay in registers over a whole bag.
#pragma once
#include "../simd/lanes.h"
#include "quantized.h"

namespace fxopt::FXOPT_ISA {

constexpr int kBlock = 16;  // a sum over a padded axis adds blocks of 16 rows in order, and then the blocks

template <class A, int BYTES>
struct Vector {
  typedef A type __attribute__((vector_size(BYTES)));
};
template <class A>
struct Vector<A, sizeof(A)> {
  typedef A type;
};

#if FXOPT_VECTOR_BYTES >= 32
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef double D4 __attribute__((vector_size(32)));
typedef double D2 __attribute__((vector_size(16)));
inline F8 fma(F8 a, F8 b, F8 c) { return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline F4 fma(F4 a, F4 b, F4 c) { return (F4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
inline D4 fma(D4 a, D4 b, D4 c) { return (D4)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
inline D2 fma(D2 a, D2 b, D2 c) { return (D2)_mm_fmadd_pd((__m128d)a, (__m128d)b, (__m128d)c); }
#endif
#if FXOPT_VECTOR_BYTES == 64
typedef float F16 __attribute__((vector_size(64)));
typedef double D8 __attribute__((vector_size(64)));
inline F16 fma(F16 a, F16 b, F16 c) { return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline D8 fma(D8 a, D8 b, D8 c) { return (D8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#endif
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#if FXOPT_VECTOR_BYTES < 32
template <class V>
inline V fma(V a, V b, V c) {
  for (unsigned k = 0; k < sizeof(V) / sizeof(a[0]); k++) c[k] = fma(a[k], b[k], c[k]);
  return c;
}
#endif

template <class V, class A>
inline V add_weighted(V acc, V row, A weight, bool fused) {
  if constexpr (__is_same(V, A)) return fused ? fma(row, weight, acc) : acc + row * weight;
  else return fused ? fma(row, V{} + weight, acc) : acc + row * weight;
}

template <class T, class A>
inline void widen_row_of(const Table& table, int64_t id, A* out) {
  const char* row = table.data + id * table.row_stride;
  if (table.column_stride == sizeof(T)) return widen_all(reinterpret_cast<const T*>(row), table.dim, out);
  for (int64_t k = 0; k < table.dim; k++) out[k] = A(widen(*reinterpret_cast<const T*>(row + k * table.column_stride)));
}

template <class A>
inline void widen_row(const Table& table, int64_t id, A* out) {
  switch (table.dtype) {
    case kFloat: return widen_row_of<float>(table, id, out);
    case kDouble: return widen_row_of<double>(table, id, out);
    case kHalf: return widen_row_of<Half>(table, id, out);
    case kUInt8: return widen_codes(table, id, out);
    default: return widen_row_of<BFloat16>(table, id, out);
  }
}

template <class A>
struct Bag {
  const char* table;
  int64_t row_stride;
  const int64_t* ids;
  const A* weights;  // null: none
  bool fused;        // w * row + acc with one rounding, as FBGEMM's bags do
  int64_t n;
  int64_t fetched;   // ids of this and the next bags, to fetch each block's own columns ahead; 0: no prefetch
};

inline int64_t id_ahead(const int64_t* ids, int64_t k, int64_t n) { return ids[k < n ? k : n - 1]; }

// `acc` holds one vector of BYTES for each I, from column `at` of the table. Indices are constants (I, not a loop), so
// that the sums are registers: GCC keeps a looped-over array of vectors in memory, at twice the time.
template <class A, int BYTES, bool WEIGHTED, int... I>
inline void add_block(const Bag<A>& bag, int64_t at, A* acc, std::integer_sequence<int, I...>) {
  using V = typename Vector<A, BYTES>::type;
  constexpr int kLanes = BYTES / sizeof(A), kLine = BYTES < 64 ? 64 / BYTES : 1;  // vectors in a cache line
  const char* table = bag.table + at * sizeof(A);
  V sum[sizeof...(I)] = {load_as<V>(acc + I * kLanes)...};
  for (int64_t k = 0; k < bag.n; k++) {
    if (bag.fetched) {
      const char* far = table + id_ahead(bag.ids, k + kFarAhead, bag.fetched) * bag.row_stride;
      const char* near = table + id_ahead(bag.ids, k + kAhead, bag.fetched) * bag.row_stride;
      ((I % kLine == 0 ? __builtin_prefetch((I ? near : far) + I * BYTES) : void()), ...);
    }
    const char* row = table + bag.ids[k] * bag.row_stride;
    if constexpr (WEIGHTED) {
      const A weight = bag.weights[k];
      ((sum[I] = add_weighted<V, A>(sum[I], load_as<V>(row + I * BYTES), weight, bag.fused)), ...);
    } else {
      ((sum[I] += load_as<V>(row + I * BYTES)), ...);
    }
  }
  (memcpy(acc + I * kLanes, &sum[I], sizeof(V)), ...);
}

template <class A, int BYTES, int N, bool WEIGHTED>
inline void add_block(const Bag<A>& bag, int64_t at, A* acc) {
  add_block<A, BYTES, WEIGHTED>(bag, at, acc, std::make_integer_sequence<int, N>());
}

template <class A, bool WEIGHTED>
void add_rows(Bag<A> bag, int64_t dim, A* acc) {
  constexpr int kBytes = FXOPT_VECTOR_BYTES, kLanes = kBytes / sizeof(A), kSmall = 16 / sizeof(A);
  int64_t at = 0;
  auto advance = [&](int64_t lanes) {
    at += lanes;
    acc += lanes;
  };
  for (; dim - at >= 4 * kLanes; advance(4 * kLanes)) add_block<A, kBytes, 4, WEIGHTED>(bag, at, acc);
  for (; dim - at >= 2 * kLanes; advance(2 * kLanes)) add_block<A, kBytes, 2, WEIGHTED>(bag, at, acc);
  for (; dim - at >= kLanes; advance(kLanes)) add_block<A, kBytes, 1, WEIGHTED>(bag, at, acc);
  if constexpr (kBytes > 32)
    for (; dim - at >= kLanes / 2; advance(kLanes / 2)) add_block<A, kBytes / 2, 1, WEIGHTED>(bag, at, acc);
  if constexpr (kBytes > 16)
    for (; dim - at >= kSmall; advance(kSmall)) add_block<A, 16, 1, WEIGHTED>(bag, at, acc);
  for (; dim - at >= 1; advance(1)) add_block<A, sizeof(A), 1, WEIGHTED>(bag, at, acc);
}

template <class A>
void add_rows(const Bag<A>& bag, int64_t dim, A* acc) {
  bag.weights ? add_rows<A, true>(bag, dim, acc) : add_rows<A, false>(bag, dim, acc);
}

// The maximum so far and a row, as torch's max over a dim: NaN wins. acc holds nothing yet where not `started`.
template <class A>
inline void max_row(A* acc, const A* row, int64_t dim, bool started) {
  for (int64_t d = 0; d < dim; d++)
    acc[d] = !started || ((row[d] > acc[d] || row[d] != row[d]) && acc[d] == acc[d]) ? row[d] : acc[d];
}

}  // namespace fxopt::FXOPT_ISA
