// Maxima, fp64, and rows that 16-byte chunks do not fit: a lane owns dims, ids come one by one.
#pragma once
#include "parts.cuh"

namespace fxopt::cuda {

template <class A>
__device__ __noinline__ void pool_any(const Launch& launch, const Record& record, int64_t row, int64_t rows, Part part) {
  const int thread = threadIdx.x & 31, dtype = record.table_dtype;
  const bool is_max = record.pool == kMax, masked = record.flags & kIsMasked;
  Bag bag = bag_of(launch, record, row, rows, true);
  const int begin = cut(bag, part, 32);
  const A value = masked ? A(launch.rares[record.extra].masked_value) : A(0);
  for (int64_t block = 0; block < record.dim; block += 32) {
    const int64_t d = block + thread;
    const int64_t own = d < record.dim ? d : 0;
    A found = is_max ? A(-INFINITY) : A(0), first = 0;
    int count = 0, kept = 0, poisoned = bag.broken;
    for (int at = begin; at < bag.length; at += 32) {
      const Member<A> mine = member<A>(launch, record, bag, at + thread, block == 0);
      poisoned |= __any_sync(kAll, mine.id == kBad);
      const unsigned counts = __ballot_sync(kAll, mine.counts);
#pragma unroll 2
      for (int k = 0; k < 32; k++) {
        const int64_t id = __shfl_sync(kAll, mine.id, k);
        const A weight = __shfl_sync(kAll, mine.weight, k);
        if (id < 0) continue;
        const bool here = counts >> k & 1;
        const A x = !here && record.masked == kFilled ? value : row_value<A>(record, record.table + id * record.table_stride, own);
        if (is_max) {
          const A y = here || record.masked == kFilled ? x : A(rounded(x - value, dtype));
          if (count == 0) first = y;
          found = larger(record, found, y);
        } else {
          found += here ? x * weight : record.masked == kFilled ? A(0) : x * A(0);
        }
        count++;
        kept += here;
      }
    }
    if (part.of > 1) {
      A* to = values_of<A>(part.found);
      if (d < record.dim) to[d] = found;
      if (d < record.dim && is_max) to[record.dim + d] = first;
      if (block == 0 && thread == 0) *reinterpret_cast<PartTotals*>(part.found) = {count, kept, poisoned, 0};
      continue;
    }
    if (is_max) found = larger(record, first, found);
    const A by = divisor<A>(launch, record, row, kept);
    if (d < record.dim) put(record, output(launch, record, row, 0) + d * size_of(record.out_dtype), finished(record, found, count, poisoned), by);
  }
}

}  // namespace fxopt::cuda
