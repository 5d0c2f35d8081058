// torch.bucketize / searchsorted: the number of boundaries below (left) or not above (right) each value.
#pragma once
#include "types.h"

namespace fxopt::FXOPT_ISA {

constexpr int64_t kCountLimit = 192;  // beyond this many boundaries a binary search beats compare-and-count

template <class T, bool RIGHT>
inline bool stops(T boundary, T value) {
  return RIGHT ? boundary > value : boundary >= value;
}

// torch's own loop: also right, element for element, when the boundaries are not sorted.
template <bool RIGHT, class T, class Load>
inline int64_t search(int64_t n, T value, Load load) {
  int64_t start = 0, end = n;
  while (start < end) {
    const int64_t middle = start + ((end - start) >> 1);
    if (stops<T, RIGHT>(load(middle), value)) end = middle;
    else start = middle + 1;
  }
  return start;
}

// Sorted boundaries without a loop-carried branch.
template <class T, bool RIGHT>
inline int64_t search_sorted(const T* boundaries, int64_t n, T value) {
  const T* base = boundaries;
  for (int64_t length = n; length > 0;) {
    const int64_t half = (length + 1) / 2;
    base += stops<T, RIGHT>(base[half - 1], value) ? 0 : half;
    length -= half;
  }
  return base - boundaries;
}

template <class T>
inline bool is_sorted(const T* boundaries, int64_t n) {
  int unsorted = 0;  // NaN counts as unsorted; an int of a byte would not vectorize
  for (int64_t j = 0; j + 1 < n; j++) unsorted |= !(boundaries[j] <= boundaries[j + 1]);
  return !unsorted;
}

// Compare-and-count over sorted boundaries, K vectors of values at a time.
template <class T, bool RIGHT, int... K>
inline void count_across(const T* boundaries, int64_t n_boundaries, const T* values, int n, int64_t* out, std::integer_sequence<int, K...>) {
  constexpr int kLanes = FXOPT_VECTOR_BYTES / sizeof(T);
  typedef T V __attribute__((vector_size(FXOPT_VECTOR_BYTES)));
  using Mask = decltype(V{} >= V{});
  alignas(64) T block[sizeof...(K) * kLanes] = {};
  memcpy(block, values, n * sizeof(T));
  const V v[] = {*reinterpret_cast<const V*>(block + K * kLanes)...};
  Mask above[] = {Mask{} * K...};  // counts down: a true compare is -1
  for (int64_t j = 0; j < n_boundaries; j++) {
    const V boundary = boundaries[j] - V{};
    ((above[K] += RIGHT ? boundary > v[K] : boundary >= v[K]), ...);
  }
  for (int k = 0; k < n; k++) out[k] = n_boundaries + above[k / kLanes][k % kLanes];
}

template <class T, bool RIGHT, int K>
inline void count_across(const T* boundaries, int64_t n_boundaries, const T* values, int n, int64_t* out) {
  count_across<T, RIGHT>(boundaries, n_boundaries, values, n, out, std::make_integer_sequence<int, K>());
}

#if FXOPT_VECTOR_BYTES == 64
// AVX-512 adds under a mask, which GCC does not make of the generic loops: 1.6x on 100 boundaries.
template <bool RIGHT>
inline __mmask16 below(__m512 boundary, __m512 value) {
  return _mm512_cmp_ps_mask(boundary, value, RIGHT ? _CMP_NGT_UQ : _CMP_NGE_UQ);
}

inline __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : __mmask16((1u << n) - 1); }

inline bool is_sorted(const float* boundaries, int64_t n) {
  __mmask16 unsorted = 0;
  for (int64_t j = 0; j < n - 1; j += 16) {
    const __mmask16 lanes = first_lanes(n - 1 - j);
    const __m512 here = _mm512_maskz_loadu_ps(lanes, boundaries + j), next = _mm512_maskz_loadu_ps(lanes, boundaries + j + 1);
    unsorted |= _mm512_mask_cmp_ps_mask(lanes, here, next, _CMP_NLE_UQ);
  }
  return !unsorted;
}

template <bool RIGHT, int... K>
inline void count_across(const float* boundaries, int64_t n_boundaries, const float* values, int n, int64_t* out, std::integer_sequence<int, K...>) {
  const __m512i one = _mm512_set1_epi32(1);
  const __m512 v[] = {_mm512_maskz_loadu_ps(n > 16 * K ? first_lanes(n - 16 * K) : __mmask16(0), values + 16 * K)...};
  __m512i counts[] = {_mm512_set1_epi32(K * 0)...};
  for (int64_t j = 0; j < n_boundaries; j++) {
    const __m512 boundary = _mm512_set1_ps(boundaries[j]);
    ((counts[K] = _mm512_mask_add_epi32(counts[K], below<RIGHT>(boundary, v[K]), counts[K], one)), ...);
  }
  alignas(64) int32_t flat[16 * sizeof...(K)];
  (_mm512_store_si512(flat + 16 * K, counts[K]), ...);
  for (int k = 0; k < n; k++) out[k] = flat[k];
}

template <bool RIGHT, int K>
inline void count_across(const float* boundaries, int64_t n_boundaries, const float* values, int n, int64_t* out) {
  count_across<RIGHT>(boundaries, n_boundaries, values, n, out, std::make_integer_sequence<int, K>());
}

// A single value against 16 boundaries at a time, and whether what is below it comes first: then any binary search
// finds the same place, sorted or not.
template <bool RIGHT>
inline bool count_one(const float* boundaries, int64_t n, float value, int64_t& out) {
  const __m512 v = _mm512_set1_ps(value);
  int64_t total = 0;
  uint32_t scattered = 0;
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 lanes = first_lanes(n - j);
    const uint32_t mask = below<RIGHT>(_mm512_maskz_loadu_ps(lanes, boundaries + j), v) & lanes;
    scattered |= (mask & (mask + 1)) | (total < j ? mask : 0);
    total += __builtin_popcount(mask);
  }
  out = total;
  return !scattered;
}

template <bool RIGHT>
inline void count(const float* boundaries, int64_t n_boundaries, const float* values, int n, int64_t* out) {
  int at = 0;
  for (; n - at > 32; at += 64) count_across<RIGHT, 4>(boundaries, n_boundaries, values + at, n - at < 64 ? n - at : 64, out + at);
  if (n - at > 16) return count_across<RIGHT, 2>(boundaries, n_boundaries, values + at, n - at, out + at);
  if (n - at > 0) count_across<RIGHT, 1>(boundaries, n_boundaries, values + at, n - at, out + at);
}
#endif

template <class T, bool RIGHT>
inline void count(const T* boundaries, int64_t n_boundaries, const T* values, int n, int64_t* out) {
  constexpr int kLanes = FXOPT_VECTOR_BYTES / sizeof(T);
  int at = 0;
  for (; n - at > 2 * kLanes; at += 4 * kLanes) {
    const int m = n - at < 4 * kLanes ? n - at : 4 * kLanes;
    count_across<T, RIGHT, 4>(boundaries, n_boundaries, values + at, m, out + at);
  }
  if (n - at > 4) {
    count_across<T, RIGHT, 2>(boundaries, n_boundaries, values + at, n - at, out + at);
    return;
  }
  for (; at < n; at++) {
    const T value = values[at];
    int below = 0;
    for (int j = 0; j < int(n_boundaries); j++) below += !stops<T, RIGHT>(boundaries[j], value);
    out[at] = below;
  }
}

template <class T, bool RIGHT>
inline void bucketize(const char* boundaries, int64_t stride, int64_t n_boundaries, const T* values, int n, int64_t* out) {
  const T* sorted = reinterpret_cast<const T*>(boundaries);
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (__is_same(T, float))
    if (n == 1 && stride == 4 && n_boundaries <= kCountLimit && count_one<RIGHT>(sorted, n_boundaries, values[0], out[0])) return;
#endif
  if (stride != int64_t(sizeof(T)) || !is_sorted(sorted, n_boundaries)) {
    for (int k = 0; k < n; k++)
      out[k] = search<RIGHT>(n_boundaries, values[k], [=](int64_t at) { return *reinterpret_cast<const T*>(boundaries + at * stride); });
  } else if (n_boundaries > kCountLimit) {
    for (int k = 0; k < n; k++) out[k] = search_sorted<T, RIGHT>(sorted, n_boundaries, values[k]);
  } else {
#if FXOPT_VECTOR_BYTES == 64
    if constexpr (__is_same(T, float)) return count<RIGHT>(sorted, n_boundaries, values, n, out);
#endif
    count<T, RIGHT>(sorted, n_boundaries, values, n, out);
  }
}

}  // namespace fxopt::FXOPT_ISA
