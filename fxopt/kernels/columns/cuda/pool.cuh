// Pooled bags. Some lanes of a warp share a bag: each evaluates an id, and all take the rows in turns, 16 bytes each.
#pragma once
#include "codes.cuh"
#include "pool_any.cuh"
#include "staged.cuh"

namespace fxopt::cuda {

// What ids are read with. kPlainIds: nothing that has to be called, so that more loads fit the registers.
enum Reading { kPlainIds, kWeightedIds, kAnyIds };

// Adds the rows of the ids that a warp's lanes hold, `steps` rows after each other. ALL: nobody's is left out, so that loads
// are behind each other with nothing between them. `table`: of the chunk that a lane takes, with `left` dims from there on.
// `weight`: of a sum's id, or whether a maximum takes a NaN there.
template <class T, Reading READING, bool ALL>
FXOPT_DEVICE void add_rows(const char* table, uint32_t table_stride, int left, const Lanes& lanes, int steps, int id, float weight, float (&sum)[T::kSize]) {
  constexpr bool kAlike = READING == kPlainIds && !T::kIsMax;
  constexpr int kUnroll = kAlike ? T::kUnroll : T::kUnroll / 2;  // rows whose loads a thread has in flight
#pragma unroll 1
  for (int step = 0; step < steps; step += kUnroll) {
    typename T::Chunk chunk[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      const int from = (step + u) * lanes.parallel + lanes.slot, one = __shfl_sync(kAll, id, from, lanes.width);
      const bool taken = ALL || (step + u < lanes.group && one >= 0);
      chunk[u] = T::nothing();
      if (taken) chunk[u] = T::load(table + uint64_t(uint32_t(one)) * table_stride, left);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      const float w = kAlike ? 1.0f : __shfl_sync(kAll, weight, (step + u) * lanes.parallel + lanes.slot, lanes.width);
      T::add(sum, chunk[u], step + u < lanes.group || kAlike ? w : 0.0f);
    }
  }
}

// Bags, by 16 bytes of a row; `width` lanes of the warp to a bag, 2^group_log2 of them to a row.
template <class T, Reading READING>
__device__ __noinline__ void pool_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, int width, Part part) {
  constexpr bool kSimple = READING != kAnyIds;
  const Lanes lanes = lanes_of(record, width);
  const int thread = lanes.thread, chunks = int(record.chunks), dim = int(record.dim);
  const uint32_t table_stride = uint32_t(record.table_stride);
  const PlainIds all_ids = kSimple ? plain_ids(launch, record) : PlainIds{};  // before the offsets, which it does not wait for
  const PlainWeights all_weights = READING == kWeightedIds ? plain_weights(launch, record) : PlainWeights{};
  const char* first_row = record.table;
  const bool wanted = row < rows;
  Bag bag = bag_of(launch, record, row, rows, wanted);
  const int begin = cut(bag, part), longest = warp_max(bag.length);
  const int64_t first = record.flags & kDense ? bag.row : bag.begin;
  const PlainIds ids = kSimple ? all_ids.of(first) : all_ids;
  const PlainWeights weights = READING == kWeightedIds ? all_weights.of(first) : all_weights;
  for (int block = 0; block < chunks; block += lanes.group) {
    const int chunk = block + lanes.column < chunks ? block + lanes.column : 0;  // lanes without one read the first, for nothing
    const int left = dim - chunk * T::kSize;
    const char* table = first_row + chunk * 16;
    float sum[T::kSize];
#pragma unroll
    for (int d = 0; d < T::kSize; d++) sum[d] = T::kIsMax ? -INFINITY : 0.0f;
    PartTotals totals{0, 0, bag.broken, 0};
    int64_t next = kSimple ? plain_id(ids, bag, begin + thread) : kNoId;  // on its way while earlier rows are added
    float next_weight = READING == kWeightedIds ? plain_weight(weights, bag, begin + thread) : 1.0f;
    for (int at = begin; at < longest; at += width) {
      Member<float> one;
      if constexpr (kSimple) {
        one = {take_id(launch, record, bag, ids, next, at + thread, width, block == 0), next_weight, true};
        if (T::kIsMax) one.weight = record.flags & kDense || at + thread == 0;
        if (READING == kWeightedIds) next_weight = plain_weight(weights, bag, at + width + thread);
      } else {
        one = member<float>(launch, record, bag, at + thread, block == 0);
        if (!one.counts) one.weight = 0;  // its row times 0, which is NaN for an infinite row
      }
      totals.poisoned |= one.id == kBad;
      if constexpr (!kSimple) {
        totals.count += one.id >= 0;
        totals.kept += one.id >= 0 && one.counts;
        if (!one.counts && record.masked != kScaled) one.id = kNoId;
        if (one.id < 0) one.weight = 0;  // and not infinity, times the zeros in place of a row
      }
      const int live = longest - at < width ? longest - at : width, steps = (live + lanes.parallel - 1) >> lanes.parallel_log2;
      if (READING == kPlainIds && lanes.group >= T::kUnroll && __all_sync(kAll, one.id >= 0)) add_rows<T, READING, true>(table, table_stride, left, lanes, steps, one.id, one.weight, sum);
      else add_rows<T, READING, false>(table, table_stride, left, lanes, steps, one.id, one.weight, sum);
    }
    if (kSimple) totals.count = totals.kept = bag.length - begin;
    finish_chunks<T, !kSimple>(launch, record, bag, lanes, block, wanted, part, sum, totals);
  }
}

template <class T>
FXOPT_DEVICE void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, int width, Part part, float* shared) {
  if constexpr (kStaged) {
    if (is_staged(record)) return sum_staged_bags<T>(launch, record, row, rows, width, part, shared);
  }
  if (record.flags & kPlain) return pool_bags<T, kPlainIds>(launch, record, row, rows, width, part);
  if (record.flags & kWeighted) return pool_bags<T, kWeightedIds>(launch, record, row, rows, width, part);
  pool_bags<T, kAnyIds>(launch, record, row, rows, width, part);
}

// Maxima, and rows that are not in chunks: by one call, so that the kernel has registers for what it keeps.
__device__ __noinline__ void run_other_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, int width, Part part) {
  if (record.pool != kMax) return sum_bags<LooseFloats>(launch, record, row, rows, width, part, nullptr);
  if (record.kind == kLooseBags) pool_bags<Largest<LooseFloats>, kPlainIds>(launch, record, row, rows, width, part);
  else pool_bags<Largest<Floats>, kPlainIds>(launch, record, row, rows, width, part);
}

// Bags [first, first + 32 / width) of one column, or a part of one.
FXOPT_DEVICE void run_bags(const Launch& launch, const Record& record, int64_t first, int64_t rows, int width, Part part, float* shared) {
  if (record.kind == kBagsAny) {  // of which a warp takes one
    if (record.flags & kAccurate) return pool_any<double>(launch, record, first, rows, part);
    return pool_any<float>(launch, record, first, rows, part);
  }
  const int64_t row = first + (threadIdx.x & 31) / width;
  if (record.kind == kLooseBags || record.pool == kMax) return run_other_bags(launch, record, row, rows, width, part);
  switch (record.table_dtype) {
    case kFloat: return sum_bags<Floats>(launch, record, row, rows, width, part, shared);
    case kUInt8: return pool_bags<Codes, kAnyIds>(launch, record, row, rows, width, part);  // there are no registers for more
    case kHalf: return sum_bags<Halves<false>>(launch, record, row, rows, width, part, shared);
    default: return sum_bags<Halves<true>>(launch, record, row, rows, width, part, shared);
  }
}

// A part of a bag that is not plain, nor of fp64; all lanes of a warp share it.
FXOPT_DEVICE void run_any_bag(const Launch& launch, const Record& record, int64_t row, int64_t rows, Part part) {
  if (record.kind != kBags) return pool_any<float>(launch, record, row, rows, part);
  const bool weighted = record.flags & kWeighted;
  switch (record.table_dtype) {
    case kFloat: return weighted ? pool_bags<Floats, kWeightedIds>(launch, record, row, rows, 32, part) : pool_bags<Floats, kAnyIds>(launch, record, row, rows, 32, part);
    case kUInt8: return pool_bags<Codes, kAnyIds>(launch, record, row, rows, 32, part);
    case kHalf: return weighted ? pool_bags<Halves<false>, kWeightedIds>(launch, record, row, rows, 32, part) : pool_bags<Halves<false>, kAnyIds>(launch, record, row, rows, 32, part);
    default: return weighted ? pool_bags<Halves<true>, kWeightedIds>(launch, record, row, rows, 32, part) : pool_bags<Halves<true>, kAnyIds>(launch, record, row, rows, 32, part);
  }
}

}  // namespace fxopt::cuda
