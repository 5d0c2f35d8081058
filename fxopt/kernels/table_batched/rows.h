// Sums of rows in 8 bits, in the order and with the roundings of FBGEMM: sum + offset, then plus scale * code.
#include "../columns/types.h"
#include "../simd/codes.h"
#include "../simd/vector.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int kMost = 8;        // vectors of a row that are summed at once
constexpr int64_t kAhead = 16;  // ids whose rows are fetched meanwhile
constexpr int64_t kHeader = 4;  // bytes in front of a row's codes

inline float half_of(const char* from) {
  Half half;
  memcpy(&half, from, sizeof half);
#if FXOPT_VECTOR_BYTES > 16
  return _cvtsh_ss(half.bits);
#else
  return widen(half);
#endif
}

// The codes of the next lanes, of `left`; nothing behind the row is read.
inline Floats codes_of(const char* from, int64_t left) {
  if (left >= kLanes) return load_codes<Floats>(from);
  char codes[kLanes] = {};
  memcpy(codes, from, size_t(left));
  return load_codes<Floats>(codes);
}

// n vectors of a row's sum, from number `first` on; all lanes of all but the last one count.
template <int n, class Id>
inline void sum_part(const Bags& job, int64_t first, const Id* ids, int64_t begin, int64_t end, float factor, float* out) {
  const char* const table = job.table;
  const float* const weights = job.weights;
  const int64_t stride = job.row_stride, left = job.dim - first - (n - 1) * kLanes;
  Floats sums[n] = {};
  for (int64_t at = begin; at < end; at++) {
    const char* const row = table + int64_t(ids[at]) * stride;
    const float weight = weights ? weights[at] : 1.0f;
    const Floats scale = splat(half_of(row) * weight), offset = splat(half_of(row + 2) * weight);
    const char* const codes = row + kHeader + first;
#pragma GCC unroll 8
    for (int k = 0; k < n - 1; k++) sums[k] = fma(load_codes<Floats>(codes + k * kLanes), scale, sums[k] + offset);
    sums[n - 1] = fma(codes_of(codes + (n - 1) * kLanes, left), scale, sums[n - 1] + offset);
  }
#pragma GCC unroll 8
  for (int k = 0; k < n - 1; k++) store(out + first + k * kLanes, sums[k] * splat(factor));
  store_part(out + first + (n - 1) * kLanes, sums[n - 1] * splat(factor), left);
}

// n: vectors of a row, but for whole parts of kMost in front of them.
template <int n, class Id>
inline void sum(const Bags& job, const Id* ids, int64_t begin, int64_t end, float factor, float* out) {
  int64_t first = 0;
  for (; first + kMost * kLanes < job.dim; first += kMost * kLanes) sum_part<kMost>(job, first, ids, begin, end, factor, out);
  sum_part<n>(job, first, ids, begin, end, factor, out);
}

template <int n, class Id>
static bool look_up(const Bags& job, const Id* ids) {
  const Integers offsets = job.offsets;
  const int64_t first = offsets[job.begin], last = offsets[job.end], stride = job.row_stride;
  if (first < 0 || last < first || last > job.n_ids) return false;
  const uint64_t rows = uint64_t(job.n_rows);
  uint64_t bad = 0;
  for (int64_t at = first; at < last; at++) bad |= uint64_t(uint64_t(int64_t(ids[at])) >= rows);
  if (bad) return false;
  int64_t fetched = first;
  for (int64_t bag = job.begin, at = first; bag < job.end; bag++) {
    const int64_t next = offsets[bag + 1];
    if (next < at || next > last) return false;
    for (; fetched < next + kAhead && fetched < last; fetched++)
      for (int64_t k = 0; k < stride; k += 64) __builtin_prefetch(job.table + int64_t(ids[fetched]) * stride + k);
    if (job.pooled) sum<n>(job, ids, at, next, job.mean && next > at ? 1.0f / float(next - at) : 1.0f, job.out + bag * job.out_stride);
    else for (int64_t id = at; id < next; id++) sum<n>(job, ids, id, id + 1, 1.0f, job.out + id * job.out_stride);
    at = next;
  }
  return true;
}

template <class Id>
static bool look_up_all(const Bags& job, const Id* ids) {
  switch ((job.dim + kLanes - 1) / kLanes % kMost) {
    case 1: return look_up<1>(job, ids);
    case 2: return look_up<2>(job, ids);
    case 3: return look_up<3>(job, ids);
    case 4: return look_up<4>(job, ids);
    case 5: return look_up<5>(job, ids);
    case 6: return look_up<6>(job, ids);
    case 7: return look_up<7>(job, ids);
    default: return look_up<kMost>(job, ids);
  }
}

static bool look_up_ids(const Bags& job) {
  if (job.ids.wide) return look_up_all(job, reinterpret_cast<const int64_t*>(job.ids.data));
  return look_up_all(job, reinterpret_cast<const int32_t*>(job.ids.data));
}

const Kernels kernels = {look_up_ids};

}  // namespace fxopt::FXOPT_ISA
