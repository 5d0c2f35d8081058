// Pooled bags. Some lanes of a warp share a bag: each evaluates an id, and all take the rows in turns, 16 bytes a load.
#pragma once
#include "codes.cuh"
#include "pool_any.cuh"
#include "staged.cuh"

namespace fxopt::cuda {

// Sums and means of rows in 16-byte chunks; `width` lanes of the warp to a bag, 2^group_log2 of them to a row. PLAIN:
// ids without a program, weights, masks or padding, so that nothing is called and more loads fit the registers.
template <class T, bool PLAIN>
__device__ __noinline__ void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width, Part part) {
  constexpr int kSize = T::kSize, kUnroll = PLAIN ? T::kUnroll : T::kUnroll / 2;  // rows whose loads a thread has in flight
  const Lanes lanes = lanes_of(record, width);
  const int thread = lanes.thread, group = lanes.group, column = lanes.column;
  Bag bag = bag_of(launch, record, row, rows, wanted);
  const int begin = cut(bag, part, width), longest = warp_max(bag.length);
  for (int block = 0; block < int(record.chunks); block += group) {
    const bool mine = block + column < int(record.chunks);
    const char* table = record.table + (block + column) * 16;
    float sum[kSize] = {};
    PartTotals totals{0, 0, bag.broken, 0};
    const char* ids = PLAIN ? plain_ids(launch, record, bag) : nullptr;
    int64_t next = PLAIN ? plain_id(record, ids, bag, begin + thread) : kNoId;  // on its way while earlier rows are added
    for (int at = begin; at < longest; at += width) {
      Member<float> one;
      if constexpr (PLAIN) {
        one = {take_id(launch, record, bag, ids, next, at + thread, width, block == 0), 1.0f, true};
      } else {
        one = member<float>(launch, record, bag, at + thread, block == 0);
        if (!one.counts) one.weight = 0;  // its row times 0, which is NaN for an infinite row
      }
      totals.poisoned |= one.id == kBad;
      if constexpr (!PLAIN) {
        totals.count += one.id >= 0;
        totals.kept += one.id >= 0 && one.counts;
        if (!one.counts && record.masked != kScaled) one.id = kNoId;
      }
      for (int step = 0; step < group; step += kUnroll) {
        typename T::Chunk chunk[kUnroll];
        float w[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          w[u] = 0;
          chunk[u] = {};
          if (step + u >= group) continue;
          const int from = (step + u) * lanes.parallel + lanes.slot;
          const int id = __shfl_sync(kAll, one.id, from, width);
          const float weight = PLAIN ? 1.0f : __shfl_sync(kAll, one.weight, from, width);
          if (id < 0 || !mine) continue;
          w[u] = weight;
          chunk[u] = T::load(table + id * record.table_stride, int(record.dim) - (block + column) * 16);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) T::add(sum, chunk[u], PLAIN ? 1.0f : w[u]);
      }
    }
    if (PLAIN) totals.count = totals.kept = bag.length - begin;
    finish_chunks<T, !PLAIN>(launch, record, bag, lanes, block, wanted, part, sum, totals);
  }
}

template <class T>
FXOPT_DEVICE void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width, Part part, float* shared) {
  if constexpr (kStaged && T::kSize < Codes::kSize) {
    if (is_staged(record)) return sum_staged_bags<T>(launch, record, row, rows, wanted, width, part, shared);
  }
  if (record.flags & kPlain) sum_bags<T, true>(launch, record, row, rows, wanted, width, part);
  else sum_bags<T, false>(launch, record, row, rows, wanted, width, part);
}

// Bags [first, first + 32 / width) of one column, or a part of one.
FXOPT_DEVICE void run_bags(const Launch& launch, const Record& record, int64_t first, int64_t rows, int width, Part part, float* shared) {
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
    case kFloat: return sum_bags<Floats>(launch, record, row, rows, wanted, width, part, shared);
    case kUInt8: return sum_bags<Codes>(launch, record, row, rows, wanted, width, part, shared);
    case kHalf: return sum_bags<Halves<false>>(launch, record, row, rows, wanted, width, part, shared);
    default: return sum_bags<Halves<true>>(launch, record, row, rows, wanted, width, part, shared);
  }
}

}  // namespace fxopt::cuda
