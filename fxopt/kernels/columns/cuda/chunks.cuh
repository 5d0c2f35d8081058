// Rows in 16-byte chunks, and the ids of plain bags that name them.
#pragma once
#include "parts.cuh"

namespace fxopt::cuda {

// 16 bytes of a row; FXOPT_KEEP_ROWS: that L2 gives up last.
FXOPT_DEVICE uint4 load_row(const char* from) {
#if defined(FXOPT_KEEP_ROWS) && defined(__CUDACC__)
  uint64_t policy;
  uint4 bits;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;" : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(from), "l"(policy));
  return bits;
#else
  return __ldg(reinterpret_cast<const uint4*>(from));
#endif
}

// What bags read of a row at a time, as codes.cuh's Codes, and what becomes of it.
struct Whole {
  static constexpr int kUnroll = kLoads;
  static constexpr bool kIsMax = false;
  using Chunk = uint4;
  FXOPT_DEVICE static Chunk load(const char* from, int) { return load_row(from); }
  FXOPT_DEVICE static Chunk nothing() { return {}; }  // where there is no row
};
struct Floats : Whole {
  static constexpr int kSize = 4;
  FXOPT_DEVICE static void add(float* sum, uint4 bits, float w) {
    sum[0] = fmaf(__uint_as_float(bits.x), w, sum[0]);
    sum[1] = fmaf(__uint_as_float(bits.y), w, sum[1]);
    sum[2] = fmaf(__uint_as_float(bits.z), w, sum[2]);
    sum[3] = fmaf(__uint_as_float(bits.w), w, sum[3]);
  }
  FXOPT_DEVICE static uint4 bits(const float* sum) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])};
  }
};
// Of rows that are not a multiple of 16 bytes, or do not begin at one: an element at a time, `left` of them at most.
struct LooseFloats : Floats {
  FXOPT_DEVICE static Chunk load(const char* from, int left) {
    Chunk bits{load_as<unsigned>(from), 0, 0, 0};
    if (left > 1) bits.y = load_as<unsigned>(from + 4);
    if (left > 2) bits.z = load_as<unsigned>(from + 8);
    if (left > 3) bits.w = load_as<unsigned>(from + 12);
    return bits;
  }
};
// Maxima of either. A weight other than 0 says that a NaN wins; it then stays, because nothing is larger.
template <class T>
struct Largest : T {
  static constexpr bool kIsMax = true;
  FXOPT_DEVICE static uint4 nothing() {
    const unsigned least = __float_as_uint(-INFINITY);
    return {least, least, least, least};
  }
  FXOPT_DEVICE static void take(float& best, float x, bool nan_wins) {
    if (x > best || (nan_wins && x != x)) best = x;
  }
  FXOPT_DEVICE static void add(float* best, uint4 bits, float w) {
    take(best[0], __uint_as_float(bits.x), w != 0);
    take(best[1], __uint_as_float(bits.y), w != 0);
    take(best[2], __uint_as_float(bits.z), w != 0);
    take(best[3], __uint_as_float(bits.w), w != 0);
  }
};
template <bool BFLOAT>
struct Halves : Whole {
  static constexpr int kSize = 8;
  FXOPT_DEVICE static void add(float* sum, uint4 bits, float w) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const uint16_t half = uint16_t(words[k / 2] >> k % 2 * 16);
      sum[k] = fmaf(BFLOAT ? bfloat16_to_float(half) : half_to_float(half), w, sum[k]);
    }
  }
  FXOPT_DEVICE static unsigned half(float x) { return BFLOAT ? float_to_bfloat16(x) : float_to_half(x); }
  FXOPT_DEVICE static uint4 bits(const float* sum) {
    return {half(sum[0]) | half(sum[1]) << 16, half(sum[2]) | half(sum[3]) << 16, half(sum[4]) | half(sum[5]) << 16, half(sum[6]) | half(sum[7]) << 16};
  }
};

FXOPT_DEVICE int warp_max(int x) {
  for (int k = 16; k >= 1; k >>= 1) {
    const int other = __shfl_xor_sync(kAll, x, k);
    x = x > other ? x : other;
  }
  return x;
}

// The ids of a bag of plain ones. What a loop over a record's rows needs is copied out of the record: within the loop the
// compiler would load it again for every row, and the row only then.
struct PlainIds {
  const char* data;  // of all bags, or of one
  int64_t row_stride;
  int32_t stride;
  bool wide;  // int64
  uint32_t table_rows;

  FXOPT_DEVICE PlainIds of(int64_t at) const { return {data + at * row_stride, row_stride, stride, wide, table_rows}; }
};

FXOPT_DEVICE PlainIds plain_ids(const Launch& launch, const Record& record) {
  const View& view = record.ids.view;
  return {reinterpret_cast<const char*>(launch.words[view.word]) + view.offset, view.row_stride, int32_t(record.flags & kDense ? view.lane_stride : view.row_stride), view.dtype == kInt64, uint32_t(record.table_rows)};
}

FXOPT_DEVICE int64_t plain_id(const PlainIds& ids, const Bag& bag, int k) {
  if (k >= bag.length) return kNoId;
  const char* from = ids.data + int64_t(k) * ids.stride;
  return ids.wide ? int64_t(load_as<long long>(from)) : int64_t(load_as<int>(from));
}

// The id at `k`, checked; `next` holds it, and gets the one of the next turn. All 32 threads call it.
FXOPT_DEVICE int take_id(const Launch& launch, const Record& record, const Bag& bag, const PlainIds& ids, int64_t& next, int k, int width, bool first_look) {
  const bool wanted = k < bag.length, bad = wanted && uint64_t(next) >= ids.table_rows;
  int id = int(next);
  if (__any_sync(kAll, bad)) id = int(checked(launch, record, wanted, next, k, bag.row, first_look));
  next = plain_id(ids, bag, k + width);
  return id;
}

// Their weights, as lanes or as rows of a strided tensor.
struct PlainWeights {
  const char* data;
  int64_t row_stride, stride;
  int dtype;

  FXOPT_DEVICE PlainWeights of(int64_t at) const { return {data + at * row_stride, row_stride, stride, dtype}; }
};

FXOPT_DEVICE PlainWeights plain_weights(const Launch& launch, const Record& record) {
  const View& view = launch.rares[record.extra].weights;
  const char* data = reinterpret_cast<const char*>(launch.words[view.word]) + view.offset;
  return {data, view.row_stride, record.flags & kDense ? view.lane_stride : view.row_stride, view.dtype};
}

FXOPT_DEVICE float plain_weight(const PlainWeights& weights, const Bag& bag, int k) {
  if (k >= bag.length) return 0;
  const char* from = weights.data + k * weights.stride;
  if (weights.dtype == kFloat) return load_as<float>(from);
  const uint16_t half = load_as<unsigned short>(from);
  return weights.dtype == kHalf ? half_to_float(half) : bfloat16_to_float(half);
}

// How the `width` lanes of a warp that share a bag take its rows: 2^group_log2 lanes to a row, a chunk each.
struct Lanes {
  int width, thread, group, slot, parallel, parallel_log2, column;
};

FXOPT_DEVICE Lanes lanes_of(const Record& record, int width) {
  const int log2 = record.group_log2, thread = threadIdx.x & (width - 1), group = 1 << log2, parallel = width >> log2;
  return {width, thread, group, thread >> log2, parallel, 31 - __clz(parallel), thread & (group - 1)};
}

// Joins what the lanes of a bag hold of the chunks from `block` on, and writes it. OWN: `totals` count a lane's ids, not the bag's.
template <class T, bool OWN>
FXOPT_DEVICE void finish_chunks(const Launch& launch, const Record& record, const Bag& bag, const Lanes& lanes, int block, bool wanted, const Part& part, float (&sum)[T::kSize], PartTotals totals) {
  constexpr int kSize = T::kSize;
  for (int k = lanes.width >> 1; k >= lanes.group; k >>= 1) {
#pragma unroll
    for (int d = 0; d < kSize; d++) {
      const float other = __shfl_xor_sync(kAll, sum[d], k);
      if constexpr (T::kIsMax) T::take(sum[d], other, true);
      else sum[d] += other;
    }
  }
  if (OWN || __any_sync(kAll, totals.poisoned)) {
    for (int k = lanes.width >> 1; k >= 1; k >>= 1) {
      if (OWN) totals.count += __shfl_xor_sync(kAll, totals.count, k);
      if (OWN) totals.kept += __shfl_xor_sync(kAll, totals.kept, k);
      totals.poisoned |= __shfl_xor_sync(kAll, totals.poisoned, k);
    }
  }
  const int first = (block + lanes.column) * kSize, left = int(record.dim) - first;
  const bool writes = left > 0 && !lanes.slot;
  if (part.of > 1) {
    float* found = values_of<float>(part.found) + first;
    if constexpr (T::kIsMax) {
      for (int d = 0; writes && d < kSize && d < left; d++) found[d] = found[record.dim + d] = sum[d];  // a first value that is NaN is still here
    } else if (writes) {
      for (int d = 0; d < kSize; d += 4) *reinterpret_cast<float4*>(found + d) = float4{sum[d], sum[d + 1], sum[d + 2], sum[d + 3]};
    }
    if (block == 0 && lanes.thread == 0) *reinterpret_cast<PartTotals*>(part.found) = totals;
    return;
  }
  const float by = divisor<float>(launch, record, bag.row, totals.kept);
  if (!wanted || !writes) return;
  char* out = output(launch, record, bag.row, 0) + first * element_size(record.out_dtype);
  if constexpr (kSize <= 8) {
    if (record.chunk_bytes == 16) {  // in the rows' dtype, aligned, nothing more to do
#pragma unroll
      for (int d = 0; d < kSize; d++) sum[d] = finished(record, sum[d], totals.count, totals.poisoned);
      *reinterpret_cast<uint4*>(out) = T::bits(sum);
      return;
    }
  }
#pragma unroll 1
  for (int d = 0; d < kSize && d < left; d++) {  // not unrolled: that was most of the code of bags
    put(record, out + d * element_size(record.out_dtype), finished(record, sum[0], totals.count, totals.poisoned), by);
#pragma unroll
    for (int k = 1; k < kSize; k++) sum[k - 1] = sum[k];
  }
}

}  // namespace fxopt::cuda
