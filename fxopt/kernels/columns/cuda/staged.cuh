// Plain bags of narrow rows. Registers hold the rows of one turn, an id a lane, and of 16 bytes each that is too little on
// its way to keep the memory busy. So the rows of several turns go to a ring in shared memory by cp.async, as MICRO 2024
// (tuning.py) proposes; a thread reads only what it copied itself, so there is nothing to synchronize.
#pragma once
#include "async.cuh"
#include "chunks.cuh"

namespace fxopt::cuda {

constexpr int kMostStagedLog2 = 2;  // lanes of a row; with more the loads of one turn are enough

FXOPT_DEVICE bool is_staged(const Record& record) { return record.kind == kBags && (record.flags & kPlain) && record.group_log2 <= kMostStagedLog2; }

// Until the oldest of `turns` turns is there: 2^kMostStagedLog2 chunks of it, or less.
FXOPT_DEVICE void wait_for_oldest(int turns) {
  if (turns == kRing) wait_copies<kRing - 1>();
  else if (turns == kRing / 2) wait_copies<kRing / 2 - 1>();
  else wait_copies<kRing / 4 - 1>();
}

template <class T>
__device__ __noinline__ void sum_staged_bags(const Launch& launch, const Record& record, int64_t row, int64_t rows, int width, Part part, float* shared) {
  const Lanes lanes = lanes_of(record, width);
  const bool wanted = row < rows;
  Bag bag = bag_of(launch, record, row, rows, wanted);
  const int begin = cut(bag, part), longest = warp_max(bag.length), turns = kRing >> record.group_log2;
  const bool mine = lanes.column < int(record.chunks);
  const char* table = record.table + lanes.column * 16;
  const uint32_t table_stride = uint32_t(record.table_stride);
  const PlainIds ids = plain_ids(launch, record).of(record.flags & kDense ? bag.row : bag.begin);
  uint4* ring = reinterpret_cast<uint4*>(shared) + (threadIdx.x & 31);  // of this thread: every 32nd
  PartTotals totals{bag.length - begin, bag.length - begin, bag.broken, 0};
  float sum[T::kSize] = {};
  int64_t next = plain_id(ids, bag, begin + lanes.thread);
  int first = 0;  // chunk of the ring that the next turn takes
  for (int at = begin - turns * width; at < longest; at += width) {  // `turns` turns ahead of what is added
    if (at >= begin) {
      wait_for_oldest(turns);
      for (int step = 0; step < lanes.group; step++) T::add(sum, ring[(first + step) * 32], 1.0f);
    }
    const int ahead = at + turns * width;
    if (ahead < longest) {
      const int id = take_id(launch, record, bag, ids, next, ahead + lanes.thread, width, true);
      totals.poisoned |= id == kBad;
      for (int step = 0; step < lanes.group; step++) {
        const int one = __shfl_sync(kAll, id, step * lanes.parallel + lanes.slot, width);
        const bool real = one >= 0 && mine;
        copy_async(ring + (first + step) * 32, real ? table + uint64_t(uint32_t(one)) * table_stride : table, real);
      }
    }
    commit_copies();  // also nothing: groups are counted
    first = (first + lanes.group) & (kRing - 1);
  }
  finish_chunks<T, false>(launch, record, bag, lanes, 0, wanted, part, sum, totals);
}

}  // namespace fxopt::cuda
