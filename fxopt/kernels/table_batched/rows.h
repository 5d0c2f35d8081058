// Sums of rows in the order and with the roundings of FBGEMM; of codes: sum + offset, then plus scale * code.
#include "../columns/types.h"
#include "../simd/codes.h"
#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int kMost = 8;        // vectors of a row that are summed at once
constexpr int64_t kAhead = 16;  // ids whose rows are fetched meanwhile

inline float half_of(const char* from) {
  Half half;
  memcpy(&half, from, sizeof half);
#if FXOPT_VECTOR_BYTES > 16
  return _cvtsh_ss(half.bits);
#else
  return widen(half);
#endif
}

// As many numbers as there are lanes.
template <int BITS>
inline Floats numbers_of(const char* from) {
  if constexpr (BITS == 32) {
    return load(reinterpret_cast<const float*>(from));
  } else if constexpr (BITS == 16) {
#if FXOPT_VECTOR_BYTES == 64
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif FXOPT_VECTOR_BYTES == 32
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Floats v;
    for (int k = 0; k < kLanes; k++) v[k] = half_of(from + 2 * k);
    return v;
#endif
  } else if constexpr (BITS == 8) {
    return load_codes<Floats>(from);
  } else {  // each lane shifts the word that its code is in
    typedef int64_t Longs __attribute__((vector_size(FXOPT_VECTOR_BYTES)));
    int64_t all = 0;
    memcpy(&all, from, kLanes * BITS / 8);
    const Ints words = (Ints)(all - Longs{}), place = lane_numbers() * BITS;
    return to_floats(__builtin_shuffle(words, place / 32) >> place % 32 & ((1 << BITS) - 1));
  }
}

// The same of `live` < kLanes numbers; nothing behind the row is read.
template <int BITS>
inline Floats few_numbers_of(const char* from, int64_t live) {
  char copied[kLanes * BITS / 8] = {};
  memcpy(copied, from, size_t(live * BITS / 8));
  return numbers_of<BITS>(copied);
}

// n vectors of a row's sum, from lane `first` on. The last one may overlap the one in front of it: it ends with the row.
template <int BITS, int n>
inline void sum_part(const Bags& job, int64_t first, int64_t begin, int64_t end, float factor, float* out) {
  const int64_t stride = job.row_stride, live = job.dim - first, last = live >= kLanes ? std::min(live - kLanes, (n - 1) * int64_t(kLanes)) : 0;
  Floats sums[n] = {};
  for (int64_t at = begin; at < end; at++) {
    const char* const row = job.table + job.ids[at] * stride;
    const float weight = job.weights ? job.weights[at] : 1.0f;
    const char* const numbers = row + header(BITS) + first * BITS / 8;
    Floats scale = splat(weight), offset{};
    if constexpr (BITS <= 8) scale = splat(half_of(row) * weight), offset = splat(half_of(row + 2) * weight);
#pragma GCC unroll 8
    for (int k = 0; k < n; k++) {
      const char* const from = numbers + (k < n - 1 ? k * kLanes : last) * BITS / 8;
      const Floats x = n > 1 || live >= kLanes ? numbers_of<BITS>(from) : few_numbers_of<BITS>(from, live);
      if constexpr (BITS <= 8) sums[k] = fma(x, scale, sums[k] + offset);
      else sums[k] = fma(x, scale, sums[k]);
    }
  }
  out += first;
#pragma GCC unroll 8
  for (int k = 0; k < n - 1; k++) store(out + k * kLanes, sums[k] * splat(factor));
  store_part(out + last, sums[n - 1] * splat(factor), live);
}

// n: vectors of a row, but for whole parts of kMost in front of them.
template <int BITS, int n>
inline void sum(const Bags& job, int64_t begin, int64_t end, float factor, float* out) {
  int64_t first = 0;
  for (; first + kMost * kLanes < job.dim; first += kMost * kLanes) sum_part<BITS, kMost>(job, first, begin, end, factor, out);
  if (n == 1 && job.dim > kLanes) first = job.dim - kLanes;
  sum_part<BITS, n>(job, first, begin, end, factor, out);
}

template <int BITS, int n>
static bool look_up(const Bags& job) {
  const Integers ids = job.ids, offsets = job.offsets;
  const int64_t first = offsets[job.begin], last = offsets[job.end], stride = job.row_stride;
  if (first < 0 || last < first || last > job.n_ids) return false;
  const uint64_t rows = uint64_t(job.n_rows);
  uint64_t bad = 0;
  for (int64_t at = first; at < last; at++) bad |= uint64_t(uint64_t(ids[at]) >= rows);
  if (bad) return false;
  int64_t fetched = first;
  for (int64_t bag = job.begin, at = first; bag < job.end; bag++) {
    const int64_t next = offsets[bag + 1];
    if (next < at || next > last) return false;
    for (; fetched < next + kAhead && fetched < last; fetched++)
      for (int64_t k = 0; k < stride; k += 64) __builtin_prefetch(job.table + ids[fetched] * stride + k);
    if (job.pooled) sum<BITS, n>(job, at, next, job.mean && next > at ? 1.0f / float(next - at) : 1.0f, job.out + bag * job.out_stride);
    else for (int64_t id = at; id < next; id++) sum<BITS, n>(job, id, id + 1, 1.0f, job.out + id * job.out_stride);
    at = next;
  }
  return true;
}

template <int BITS>
static bool look_up(const Bags& job) {
  switch ((job.dim + kLanes - 1) / kLanes % kMost) {
    case 1: return look_up<BITS, 1>(job);
    case 2: return look_up<BITS, 2>(job);
    case 3: return look_up<BITS, 3>(job);
    case 4: return look_up<BITS, 4>(job);
    case 5: return look_up<BITS, 5>(job);
    case 6: return look_up<BITS, 6>(job);
    case 7: return look_up<BITS, 7>(job);
    default: return look_up<BITS, kMost>(job);
  }
}

static bool look_up_any(const Bags& job) {
  switch (job.bits) {
    case 32: return look_up<32>(job);
    case 16: return look_up<16>(job);
    case 8: return look_up<8>(job);
    case 4: return look_up<4>(job);
    default: return look_up<2>(job);
  }
}

const Kernels kernels = {look_up_any};

}  // namespace fxopt::FXOPT_ISA
