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
template <class T, bool RIGHT>
inline int64_t search(const char* boundaries, int64_t stride, int64_t n, T value) {
  int64_t start = 0, end = n;
  while (start < end) {
    const int64_t middle = start + ((end - start) >> 1);
    const T boundary = *reinterpret_cast<const T*>(boundaries + middle * stride);
    if (stops<T, RIGHT>(boundary, value)) end = middle;
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
template <class T, bool RIGHT, int K>
inline void count_across(const T* boundaries, int64_t n_boundaries, const T* values, int n, int64_t* out) {
  constexpr int kLanes = FXOPT_VECTOR_BYTES / sizeof(T);
  typedef T V __attribute__((vector_size(FXOPT_VECTOR_BYTES)));
  using Mask = decltype(V{} >= V{});
  T block[K * kLanes] = {};
  memcpy(block, values, n * sizeof(T));
  V v[K];
  memcpy(v, block, sizeof v);
  Mask above[K] = {};
  for (int64_t j = 0; j < n_boundaries; j++) {
    const V boundary = boundaries[j] - V{};
    for (int k = 0; k < K; k++) above[k] += RIGHT ? boundary > v[k] : boundary >= v[k];
  }
  for (int k = 0; k < n; k++) out[k] = n_boundaries + above[k / kLanes][k % kLanes];
}

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
  if (stride != int64_t(sizeof(T)) || !is_sorted(sorted, n_boundaries)) {
    for (int k = 0; k < n; k++) out[k] = search<T, RIGHT>(boundaries, stride, n_boundaries, values[k]);
  } else if (n_boundaries > kCountLimit) {
    for (int k = 0; k < n; k++) out[k] = search_sorted<T, RIGHT>(sorted, n_boundaries, values[k]);
  } else {
    count<T, RIGHT>(sorted, n_boundaries, values, n, out);
  }
}

}  // namespace fxopt::FXOPT_ISA
