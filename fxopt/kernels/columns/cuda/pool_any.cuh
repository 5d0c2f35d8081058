// Bags that chunks do not serve (see Columns::bag_kind): a lane owns dims and takes ids in order, several rows on their way.
#pragma once
#include "parts.cuh"

namespace fxopt::cuda {

constexpr int kAhead = 8;  // rows whose loads a thread has in flight

template <class A>
__device__ __noinline__ void pool_any(const Launch& launch, const Record& record, int64_t row, int64_t rows, Part part) {
  const int thread = threadIdx.x & 31, dtype = record.table_dtype;
  const bool is_max = record.pool == kMax, masked = record.flags & kIsMasked;
  Bag bag = bag_of(launch, record, row, rows, true);
  const int begin = cut(bag, part);
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
      const unsigned wanted = __ballot_sync(kAll, mine.id >= 0);
#pragma unroll 1
      for (int k = 0; k < 32; k += kAhead) {
        if ((wanted >> k & ((1 << kAhead) - 1)) == 0) continue;
        A x[kAhead];
        elements(record, mine.id, k, 1, own, A(0), x);
#pragma unroll
        for (int u = 0; u < kAhead; u++) {
          const A weight = __shfl_sync(kAll, mine.weight, k + u);
          if (!(wanted >> (k + u) & 1)) continue;
          const bool here = counts >> (k + u) & 1, filled = !here && record.masked == kFilled;
          if (is_max) {
            const A y = here ? x[u] : filled ? value : A(rounded(x[u] - value, dtype));
            if (count == 0) first = y;
            found = larger(record, found, y);
          } else {
            found += here ? x[u] * weight : filled ? A(0) : x[u] * A(0);
          }
          count++;
          kept += here;
        }
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
    if (d < record.dim) put(record, output(launch, record, row, 0) + d * element_size(record.out_dtype), finished(record, found, count, poisoned), by);
  }
}

}  // namespace fxopt::cuda
