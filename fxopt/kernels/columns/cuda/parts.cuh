// A long bag is cut among warps. Each leaves what it found in memory, and a second launch joins the parts in order.
#pragma once
#include "bag.cuh"

namespace fxopt::cuda {

// The share of a bag that a warp takes, a multiple of `grain` ids. Of more than one, `found` (16-byte aligned) gets a
// PartTotals, then [dim] sums or maxima, then, of maxima, the first values (or the maxima again: see
// finish_chunks).
struct Part {
  int16_t number, of;
  int32_t grain;
  float* found;
};

constexpr int kGrain = 4;  // of parts that a block's warps take

// Where a part begins; the bag then ends where it does.
FXOPT_DEVICE int cut(Bag& bag, const Part& part) {
  if (part.of == 1) return 0;
  const int64_t size = int64_t(bag.length / (part.of * part.grain) + 1) * part.grain, first = part.number * size;
  if (first + size < bag.length) bag.length = int(first + size);
  return first < bag.length ? int(first) : bag.length;
}

template <class A>
FXOPT_DEVICE A* values_of(float* found) { return reinterpret_cast<A*>(found + kTotalsFloats); }

// The larger one. NaN wins in a padded row, as for torch.max, and loses in a jagged bag, unless it comes first.
template <class A>
FXOPT_DEVICE A larger(const Record& record, A best, A x) {
  const bool takes = x > best || ((record.flags & kDense) && x != x && best == best);
  return takes ? x : best;
}

// Where the parts of bag `row` of a unit are.
FXOPT_DEVICE float* parts_of(const Segment& segment, int64_t unit, int64_t row) {
  return segment.sums + (unit * segment.rows + row) * segment.parts * segment.part_stride;
}

// A warp: the parts of a bag, in order.
template <class A>
FXOPT_DEVICE void join_bag(const Launch& launch, const Segment& segment, const Record& record, float* parts, int64_t row) {
  PartTotals all{0, 0, 0, 0};
  int earliest = segment.parts;  // that counts an id
  for (int part = threadIdx.x & 31; part < segment.parts; part += 32) {
    const PartTotals one = *reinterpret_cast<const PartTotals*>(parts + part * segment.part_stride);
    all.count += one.count;
    all.kept += one.kept;
    all.poisoned |= one.poisoned;
    if (one.count > 0 && part < earliest) earliest = part;
  }
  for (int k = 16; k >= 1; k >>= 1) {
    all.count += __shfl_xor_sync(kAll, all.count, k);
    all.kept += __shfl_xor_sync(kAll, all.kept, k);
    all.poisoned |= __shfl_xor_sync(kAll, all.poisoned, k);
    const int other = __shfl_xor_sync(kAll, earliest, k);
    earliest = other < earliest ? other : earliest;
  }
  const A by = divisor<A>(launch, record, row, all.kept);
  for (int d = threadIdx.x & 31; d < int(record.dim); d += 32) {
    auto at = [&](int part, int64_t place) { return values_of<A>(parts + part * segment.part_stride)[place]; };
    A found = 0;
    if (record.pool != kMax) {
#pragma unroll 16
      for (int part = 0; part < segment.parts; part++) found += at(part, d);
    } else if (earliest < segment.parts) {
      found = at(earliest, record.dim + d);
      for (int part = earliest; part < segment.parts; part++) found = larger(record, found, at(part, d));
    }
    put(record, output(launch, record, row, 0) + d * element_size(record.out_dtype), finished(record, found, all.count, all.poisoned), by);
  }
}

FXOPT_DEVICE void join_bag(const Launch& launch, const Segment& segment, int64_t unit, int64_t row) {
  const Record& record = launch.records[segment.first_unit + unit];
  float* parts = parts_of(segment, unit, row);
  if (record.flags & kAccurate) join_bag<double>(launch, segment, record, parts, row);
  else join_bag<float>(launch, segment, record, parts, row);
}

// All warps of a block, after each has left its part of bag `row` in shared memory, kShared floats from the last one's.
FXOPT_DEVICE void join_in_block(const Launch& launch, const Record& record, const float* parts, int64_t row) {
  PartTotals all{0, 0, 0, 0};
  for (int part = 0; part < kWarps; part++) {
    const PartTotals one = *reinterpret_cast<const PartTotals*>(parts + part * kShared);
    all.count += one.count;
    all.kept += one.kept;
    all.poisoned |= one.poisoned;
  }
  const float by = divisor<float>(launch, record, row, all.kept);
  for (int d = threadIdx.x; d < int(record.dim); d += kWarps * 32) {
    float found = 0;
    for (int part = 0; part < kWarps; part++) found += parts[part * kShared + kTotalsFloats + d];
    put(record, output(launch, record, row, 0) + d * element_size(record.out_dtype), finished(record, found, all.count, all.poisoned), by);
  }
}

}  // namespace fxopt::cuda
