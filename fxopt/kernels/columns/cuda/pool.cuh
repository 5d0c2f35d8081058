// Pooled bags. Some lanes of a warp share a bag: each evaluates an id, and all take the rows in turns, 16 bytes a load.
#pragma once
#include "codes.cuh"
#include "pool_any.cuh"
#include "staged.cuh"

namespace fxopt::cuda {

// What ids are read with. kPlainIds: nothing that has to be called, so that more loads fit the registers.
enum Reading { kPlainIds, kWeightedIds, kAnyIds };

// Adds the rows of the ids that a warp's lanes hold, `steps` rows after each other. ALL: nobody's is left out, so that loads
// are behind each other with nothing between them. `table`: of the chunk that a lane takes, with `left` dims from there on.
template <class T, Reading READING, bool ALL>
FXOPT_DEVICE void add_rows(const char* table, uint32_t table_stride, int left, const Lanes& lanes, int steps, int id, float weight, float (&sum)[T::kSize]) {
  constexpr int kUnroll = READING == kPlainIds ? T::kUnroll : T::kUnroll / 2;  // rows whose loads a thread has in flight
#pragma unroll 1
  for (int step = 0; step < steps; step += kUnroll) {
    typename T::Chunk chunk[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      const int from = (step + u) * lanes.parallel + lanes.slot, one = __shfl_sync(kAll, id, from, lanes.width);
      const bool taken = ALL || (step + u < lanes.group && one >= 0);
      chunk[u] = {};
      if (taken) chunk[u] = T::load(table + uint64_t(uint32_t(one)) * table_stride, left);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      const float w = READING == kPlainIds ? 1.0f : __shfl_sync(kAll, weight, (step + u) * lanes.parallel + lanes.slot, lanes.width);
      T::add(sum, chunk[u], step + u < lanes.group || READING == kPlainIds ? w : 0.0f);
    }
  }
}

// Sums and means of rows in 16-byte chunks; `width` lanes of the warp to a bag, 2^group_log2 of them to a row.
template <class T, Reading READING>
__device__ __noinline__ void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width, Part part) {
  constexpr bool kSimple = READING != kAnyIds;
  const Lanes lanes = lanes_of(record, width);
  const int thread = lanes.thread, chunks = int(record.chunks), dim = int(record.dim);
  const uint32_t table_stride = uint32_t(record.table_stride);
  const PlainIds all_ids = kSimple ? plain_ids(launch, record) : PlainIds{};  // before the offsets, which it does not wait for
  const PlainWeights all_weights = READING == kWeightedIds ? plain_weights(launch, record) : PlainWeights{};
  const char* first_row = record.table;
  Bag bag = bag_of(launch, record, row, rows, wanted);
  const int begin = cut(bag, part), longest = warp_max(bag.length);
  for (int block = 0; block < chunks; block += lanes.group) {
    const int chunk = block + lanes.column < chunks ? block + lanes.column : 0;  // lanes without one read the first, for nothing
    const char* table = first_row + chunk * 16;
    float sum[T::kSize] = {};
    PartTotals totals{0, 0, bag.broken, 0};
    const int64_t first = record.flags & kDense ? bag.row : bag.begin;
    const PlainIds ids = kSimple ? all_ids.of(first) : all_ids;
    const PlainWeights weights = READING == kWeightedIds ? all_weights.of(first) : all_weights;
    int64_t next = kSimple ? plain_id(ids, bag, begin + thread) : kNoId;  // on its way while earlier rows are added
    float next_weight = READING == kWeightedIds ? plain_weight(weights, bag, begin + thread) : 1.0f;
    for (int at = begin; at < longest; at += width) {
      Member<float> one;
      if constexpr (kSimple) {
        one = {take_id(launch, record, bag, ids, next, at + thread, width, block == 0), next_weight, true};
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
      if (READING == kPlainIds && lanes.group >= T::kUnroll && __all_sync(kAll, one.id >= 0)) add_rows<T, READING, true>(table, table_stride, dim - chunk * 16, lanes, steps, one.id, 1.0f, sum);
      else add_rows<T, READING, false>(table, table_stride, dim - chunk * 16, lanes, steps, one.id, one.weight, sum);
    }
    if (kSimple) totals.count = totals.kept = bag.length - begin;
    finish_chunks<T, !kSimple>(launch, record, bag, lanes, block, wanted, part, sum, totals);
  }
}

template <class T>
FXOPT_DEVICE void sum_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width, Part part, float* shared) {
  if constexpr (kStaged && T::kSize < Codes::kSize) {
    if (is_staged(record)) return sum_staged_bags<T>(launch, record, row, rows, wanted, width, part, shared);
  }
  if (record.flags & kPlain) return sum_bags<T, kPlainIds>(launch, record, row, rows, wanted, width, part);
  if constexpr (T::kSize < Codes::kSize) {
    if (record.flags & kWeighted) return sum_bags<T, kWeightedIds>(launch, record, row, rows, wanted, width, part);
  }
  sum_bags<T, kAnyIds>(launch, record, row, rows, wanted, width, part);
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

// A part of a bag that is not plain, nor of fp64; all lanes of a warp share it.
FXOPT_DEVICE void run_any_bag(const Launch& launch, const Record& record, int64_t row, int64_t rows, Part part) {
  if (record.kind == kBagsAny) return pool_any<float>(launch, record, row, rows, part);
  const bool weighted = record.flags & kWeighted;
  switch (record.table_dtype) {
    case kFloat: return weighted ? sum_bags<Floats, kWeightedIds>(launch, record, row, rows, true, 32, part) : sum_bags<Floats, kAnyIds>(launch, record, row, rows, true, 32, part);
    case kUInt8: return sum_bags<Codes, kAnyIds>(launch, record, row, rows, true, 32, part);
    case kHalf: return weighted ? sum_bags<Halves<false>, kWeightedIds>(launch, record, row, rows, true, 32, part) : sum_bags<Halves<false>, kAnyIds>(launch, record, row, rows, true, 32, part);
    default: return weighted ? sum_bags<Halves<true>, kWeightedIds>(launch, record, row, rows, true, 32, part) : sum_bags<Halves<true>, kAnyIds>(launch, record, row, rows, true, 32, part);
  }
}

}  // namespace fxopt::cuda
