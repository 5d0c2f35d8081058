// Pooled bags. Some lanes of a warp share a bag: each evaluates an id, and all take the rows in turns, 16 bytes a load.
#pragma once
#include "chunks.cuh"
#include "parts.cuh"
#include "pool_any.cuh"

namespace fxopt::cuda {

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
        if (__any_sync(kAll, bad)) one.id = int(checked(launch, record, wanted_id, next, at + thread, bag.row, block == 0));
        next = plain_id(record, ids, bag, at + width + thread);
      } else {
        one = member<float>(launch, record, bag, at + thread, block == 0);
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
        for (int d = 0; d < kSize; d += 4) *reinterpret_cast<float4*>(values_of<float>(part.found) + (block + column) * kSize + d) = float4{sum[d], sum[d + 1], sum[d + 2], sum[d + 3]};
      if (block == 0 && thread == 0) *reinterpret_cast<PartTotals*>(part.found) = {count, kept, poisoned, 0};
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

// Bags [first, first + 32 / width) of one column, or a part of one.
FXOPT_DEVICE void run_bags(const Launch& launch, const Record& record, int64_t first, int64_t rows, int width, Part part) {
  if (record.kind == kBagsAny) {
    for (int64_t row = first; row < rows && row < first + 32 / width; row++) {
      if (record.flags & kAccurate) pool_any<double>(launch, record, row, rows, part);
      else pool_any<float>(launch, record, row, rows, part);
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
