// Pooled bags. Some lanes of a warp share a bag: each evaluates an id, and all take the rows in turns, 16 bytes a load.
#pragma once
#include "bag.cuh"

namespace fxopt::cuda {

struct Floats {
  static constexpr int kSize = 4;
  FXOPT_DEVICE static void add(float* sum, uint4 bits, float w) {
    sum[0] = fmaf(__uint_as_float(bits.x), w, sum[0]);
    sum[1] = fmaf(__uint_as_float(bits.y), w, sum[1]);
    sum[2] = fmaf(__uint_as_float(bits.z), w, sum[2]);
    sum[3] = fmaf(__uint_as_float(bits.w), w, sum[3]);
  }
};
template <bool BFLOAT>
struct Halves {
  static constexpr int kSize = 8;
  FXOPT_DEVICE static void add(float* sum, uint4 bits, float w) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const uint16_t half = uint16_t(words[k / 2] >> k % 2 * 16);
      sum[k] = fmaf(BFLOAT ? bfloat16_to_float(half) : half_to_float(half), w, sum[k]);
    }
  }
};

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

FXOPT_DEVICE int warp_max(int x) {
  for (int k = 16; k >= 1; k >>= 1) {
    const int other = __shfl_xor_sync(kAll, x, k);
    x = x > other ? x : other;
  }
  return x;
}

// The id at `k` of a bag of plain ones, whose first is at `data`.
FXOPT_DEVICE int64_t plain_id(const Record& record, const char* data, const Bag& bag, int k) {
  if (k >= bag.length) return kNoId;
  return record.ids.view.dtype == kInt64 ? int64_t(load_as<long long>(data + int64_t(k) * 8)) : int64_t(load_as<int>(data + int64_t(k) * 4));
}

FXOPT_DEVICE const char* plain_ids(const Launch& launch, const Record& record, const Bag& bag) {
  const View& view = record.ids.view;
  return reinterpret_cast<const char*>(launch.words[view.word]) + view.offset + (record.flags & kDense ? bag.row : bag.begin) * view.row_stride;
}

// The share of a bag that a warp adds up. Of more than one, `sums` takes what it found, for join_bag().
struct Part {
  int number, of;
  float* sums;
};

// Where a part begins; the bag then ends where it does. Parts are multiples of `width` long.
FXOPT_DEVICE int cut(Bag& bag, const Part& part, int width) {
  if (part.of == 1) return 0;
  const int64_t size = int64_t(bag.length / (part.of * width) + 1) * width, first = part.number * size;
  if (first + size < bag.length) bag.length = int(first + size);
  return first < bag.length ? int(first) : bag.length;
}

// Sums and means of rows in 16-byte chunks; `width` lanes of the warp to a bag, 2^group_log2 of them to a row. PLAIN:
// ids without a program, weights, masks or padding, so that nothing is called and more loads fit the registers.
template <class T, bool PLAIN>
__device__ __noinline__ void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width, Part part) {
  constexpr int kSize = T::kSize, kUnroll = PLAIN ? kLoads : 4;  // rows whose loads a thread has in flight
  const int thread = threadIdx.x & (width - 1), group = 1 << record.group_log2, slot = thread >> record.group_log2;
  const int parallel = width >> record.group_log2, column = thread & (group - 1);
  Bag bag = bag_of(launch, record, row, rows, wanted);
  const int begin = cut(bag, part, width), longest = warp_max(bag.length);
  for (int block = 0; block < int(record.chunks); block += group) {
    const bool mine = block + column < int(record.chunks);
    const char* table = record.table + (block + column) * 16;
    float sum[kSize] = {};
    int count = 0, kept = 0, poisoned = bag.broken;
    const char* ids = PLAIN ? plain_ids(launch, record, bag) : nullptr;
    int64_t next = PLAIN ? plain_id(record, ids, bag, begin + thread) : kNoId;  // on its way while earlier rows are added
    for (int at = begin; at < longest; at += width) {
      Member<float> one;
      if constexpr (PLAIN) {
        const bool wanted_id = at + thread < bag.length, bad = wanted_id && uint64_t(next) >= uint64_t(record.table_rows);
        one = {int(next), 1.0f, true};
        if (__any_sync(kAll, bad)) one.id = int(checked(launch, record, wanted_id, next, at + thread, bag.row));
        next = plain_id(record, ids, bag, at + width + thread);
      } else {
        one = member<float>(launch, record, bag, at + thread);
        if (!one.counts) one.weight = 0;  // its row times 0, which is NaN for an infinite row
      }
      poisoned |= one.id == kBad;
      if constexpr (!PLAIN) {
        count += one.id >= 0;
        kept += one.id >= 0 && one.counts;
        if (!one.counts && record.masked != kScaled) one.id = kNoId;
      }
      for (int step = 0; step < group; step += kUnroll) {
        uint4 chunk[kUnroll];
        float w[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          w[u] = 0;
          chunk[u] = uint4{0, 0, 0, 0};
          if (step + u >= group) continue;
          const int from = (step + u) * parallel + slot;
          const int id = __shfl_sync(kAll, one.id, from, width);
          const float weight = PLAIN ? 1.0f : __shfl_sync(kAll, one.weight, from, width);
          if (id < 0 || !mine) continue;
          w[u] = weight;
          chunk[u] = load_row(table + id * record.table_stride);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) T::add(sum, chunk[u], PLAIN ? 1.0f : w[u]);
      }
    }
    for (int k = width >> 1; k >= group; k >>= 1) {
#pragma unroll
      for (int d = 0; d < kSize; d++) sum[d] += __shfl_xor_sync(kAll, sum[d], k);
    }
    if (!PLAIN || __any_sync(kAll, poisoned)) {
      for (int k = width >> 1; k >= 1; k >>= 1) {
        count += __shfl_xor_sync(kAll, count, k);
        kept += __shfl_xor_sync(kAll, kept, k);
        poisoned |= __shfl_xor_sync(kAll, poisoned, k);
      }
    }
    if (PLAIN) count = kept = bag.length - begin;
    if (part.of > 1) {
      if (mine && !slot)
        for (int d = 0; d < kSize; d += 4) *reinterpret_cast<float4*>(part.sums + (block + column) * kSize + d) = float4{sum[d], sum[d + 1], sum[d + 2], sum[d + 3]};
      if (block == 0 && thread == 0) *reinterpret_cast<PartTotals*>(part.sums + record.dim) = PartTotals{count, kept, poisoned, 0};
      continue;
    }
    const float by = divisor<float>(launch, record, bag.row, kept);
    if (!wanted || !mine || slot) continue;
    char* out = output(launch, record, row, 0) + (block + column) * kSize * size_of(record.out_dtype);
#pragma unroll
    for (int d = 0; d < kSize; d++) sum[d] = finished(record, sum[d], count, poisoned);
    if (kSize == 4 && record.chunk_bytes == 16) {  // float to float, aligned, nothing more to do
      *reinterpret_cast<float4*>(out) = float4{sum[0], sum[1], sum[2], sum[3]};
      continue;
    }
#pragma unroll
    for (int d = 0; d < kSize; d++) put(record, out + d * size_of(record.out_dtype), sum[d], by);
  }
}

template <class T>
FXOPT_DEVICE void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width, Part part) {
  if (record.flags & kPlain) sum_bags<T, true>(launch, record, row, rows, wanted, width, part);
  else sum_bags<T, false>(launch, record, row, rows, wanted, width, part);
}

// The maximum so far; a padded row's is torch.max's, where NaN wins.
template <class A>
FXOPT_DEVICE A larger(const Record& record, A best, A x, bool first) {
  const bool takes = x > best || ((record.flags & kDense) && x != x && best == best);
  return first || takes ? x : best;
}

// Everything else: maxima, fp64, rows that 16-byte chunks do not fit. A lane owns dims, ids come one by one.
template <class A>
__device__ __noinline__ void pool_any(const Launch& launch, const Record& record, int64_t row, int64_t rows) {
  const int thread = threadIdx.x & 31, dtype = record.table_dtype;
  const bool is_max = record.pool == kMax, masked = record.flags & kIsMasked;
  const Bag bag = bag_of(launch, record, row, rows, true);
  const A value = masked ? A(launch.rares[record.extra].masked_value) : A(0);
  for (int64_t block = 0; block < record.dim; block += 32) {
    const int64_t d = block + thread;
    const char* table = record.table + (d < record.dim ? d : 0) * record.column_stride;
    A sum = 0;
    int count = 0, kept = 0, poisoned = bag.broken;
    for (int at = 0; at < bag.length; at += 32) {
      const Member<A> mine = member<A>(launch, record, bag, at + thread);
      poisoned |= __any_sync(kAll, mine.id == kBad);
      const unsigned counts = __ballot_sync(kAll, mine.counts);
#pragma unroll 2
      for (int k = 0; k < 32; k++) {
        const int64_t id = __shfl_sync(kAll, mine.id, k);
        const A weight = __shfl_sync(kAll, mine.weight, k);
        if (id < 0) continue;
        const bool here = counts >> k & 1;
        const A x = !here && record.masked == kFilled ? value : as_number<A>(load_value(table + id * record.table_stride, dtype), dtype);
        if (is_max) sum = larger(record, sum, here || record.masked == kFilled ? x : A(rounded(x - value, dtype)), count == 0);
        else sum += here ? x * weight : record.masked == kFilled ? A(0) : x * A(0);
        count++;
        kept += here;
      }
    }
    const A by = divisor<A>(launch, record, row, kept);
    if (d < record.dim) put(record, output(launch, record, row, 0) + d * size_of(record.out_dtype), finished(record, sum, count, poisoned), by);
  }
}

// Where the parts of bag `row` of a unit are.
FXOPT_DEVICE float* sums_of(const Segment& segment, int64_t unit, int64_t row) {
  return segment.sums + (unit * segment.rows + row) * segment.parts * segment.part_stride;
}

// A warp: the parts of a bag, in order.
FXOPT_DEVICE void join_bag(const Launch& launch, const Segment& segment, int64_t unit, int64_t row) {
  const Record& record = launch.records[segment.first_unit + unit];
  const float* sums = sums_of(segment, unit, row);
  PartTotals all{0, 0, 0, 0};
  for (int part = threadIdx.x & 31; part < segment.parts; part += 32) {
    const PartTotals one = *reinterpret_cast<const PartTotals*>(sums + part * segment.part_stride + record.dim);
    all.count += one.count;
    all.kept += one.kept;
    all.poisoned |= one.poisoned;
  }
  for (int k = 16; k >= 1; k >>= 1) {
    all.count += __shfl_xor_sync(kAll, all.count, k);
    all.kept += __shfl_xor_sync(kAll, all.kept, k);
    all.poisoned |= __shfl_xor_sync(kAll, all.poisoned, k);
  }
  const float by = divisor<float>(launch, record, row, all.kept);
  for (int d = threadIdx.x & 31; d < int(record.dim); d += 32) {
    float sum = 0;
#pragma unroll 16
    for (int part = 0; part < segment.parts; part++) sum += sums[part * segment.part_stride + d];
    put(record, output(launch, record, row, 0) + d * size_of(record.out_dtype), finished(record, sum, all.count, all.poisoned), by);
  }
}

// Bags [first, first + 32 / width) of one column, or a part of one.
FXOPT_DEVICE void run_bags(const Launch& launch, const Record& record, int64_t first, int64_t rows, int width, Part part) {
  if (record.kind == kBagsAny) {
    for (int64_t row = first; row < rows && row < first + 32 / width; row++) {
      if (record.flags & kAccurate) pool_any<double>(launch, record, row, rows);
      else pool_any<float>(launch, record, row, rows);
    }
    return;
  }
  const int64_t row = first + (threadIdx.x & 31) / width;
  const bool wanted = row < rows;
  switch (record.table_dtype) {
    case kFloat: return sum_bags<Floats>(launch, record, row, rows, wanted, width, part);
    case kHalf: return sum_bags<Halves<false>>(launch, record, row, rows, wanted, width, part);
    default: return sum_bags<Halves<true>>(launch, record, row, rows, wanted, width, part);
  }
}

}  // namespace fxopt::cuda
