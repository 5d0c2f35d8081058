// Plain bags of few ids, in float32. A bag alone waits for its offsets, its ids and its rows in turn, and has few rows on
// their way; so the lanes of a row take four bags side by side, two ids of each at a time. Ids are added in their order.
#pragma once
#include "chunks.cuh"

namespace fxopt::cuda {

constexpr int kAtATime = 8 / kBeside;  // ids of each; a thread has eight rows on their way
constexpr int kFew = 16;               // ids that are taken so: of longer bags the rest comes eight of one at a time

template <class T>
FXOPT_DEVICE void rotate(T (&x)[kBeside]) {
  const T first = x[0];
#pragma unroll
  for (int u = 0; u + 1 < kBeside; u++) x[u] = x[u + 1];
  x[kBeside - 1] = first;
}

// Where a thread's bags begin among the ids, and how many ids they have.
struct ShortBags {
  int begin[kBeside], count[kBeside];
  unsigned broken;  // a bit a bag

  FXOPT_DEVICE ShortBags(const Launch& launch, const Record& record, int64_t row, int64_t rows) : broken(0) {
    if (load(launch, launch.rares[record.extra], row, rows)) return;
#pragma unroll 1
    for (int b = 0; b < kBeside; b++) {
      const Bag bag = bag_of(launch, record, row + b, rows, row + b < rows);  // which reports it
      begin[0] = int(bag.begin);
      count[0] = bag.length;
      rotate(begin);
      rotate(count);
      broken |= unsigned(bag.broken) << b;
    }
  }

  // False: offsets are broken, maybe another thread's.
  FXOPT_DEVICE bool load(const Launch& launch, const Rare& rare, int64_t row, int64_t rows) {
    const int64_t n = launch.words[rare.bounds_word], n_offsets = launch.words[rare.bounds_word + 1], first = rare.segment * rows;
    const char* offsets = reinterpret_cast<const char*>(launch.words[rare.offsets_word]);
    const int64_t stride = rare.offsets_stride;
    const bool wide = rare.offsets_dtype == kInt64;
    int64_t bound[kBeside + 1];
#pragma unroll
    for (int b = 0; b <= kBeside; b++) {
      const int64_t number = first + (row + b < rows ? row + b : rows);  // bags that are not there are empty
      const char* from = offsets + (number < n_offsets ? number : n_offsets - 1) * stride;
      bound[b] = wide ? int64_t(load_as<long long>(from)) : int64_t(load_as<int>(from));
      if (number >= n_offsets) bound[b] = n;
    }
    bool bad = (first + row == 0 && bound[0] != 0) || bound[0] < 0 || bound[kBeside] > n;
#pragma unroll
    for (int b = 0; b < kBeside; b++) {
      bad |= bound[b + 1] < bound[b];
      begin[b] = int(bound[b]);
      count[b] = int(bound[b + 1] - bound[b]);
    }
    return !__any_sync(kAll, bad);
  }

  FXOPT_DEVICE int longest() const {
    int most = 0;
#pragma unroll
    for (int b = 0; b < kBeside; b++) most = count[b] > most ? count[b] : most;
    return warp_max(most);
  }
};

struct Sum {
  float of[Floats::kSize];
};

// Of an id: where it is among all, and in its bag.
struct IdPlace {
  int at, position;
  bool wanted;
  int64_t row;
};

// Rows of the ids at place(0) to place(7), zeros where there are none; returns which of the ids are bad. All 32 threads call it.
template <class Place>
FXOPT_DEVICE unsigned load_rows(const Launch& launch, const Record& record, const PlainIds& ids, const char* table, uint32_t table_stride, bool counts, Place place, uint4 (&chunk)[8]) {
  auto load_id = [&](const IdPlace& from) {
    if (!from.wanted) return int64_t(kNoId);
    return ids.wide ? int64_t(load_as<long long>(ids.data + int64_t(from.at) * 8)) : int64_t(load_as<int>(ids.data + int64_t(from.at) * 4));
  };
  int id[8];
  bool bad = false;
  unsigned poisoned = 0;
#pragma unroll
  for (int u = 0; u < 8; u++) {
    const int64_t one = load_id(place(u));
    bad |= place(u).wanted && uint64_t(one) >= ids.table_rows;
    id[u] = int(one);
  }
  if (__any_sync(kAll, bad)) {
#pragma unroll
    for (int u = 0; u < 8; u++) {
      const IdPlace from = place(u);
      id[u] = int(checked(launch, record, from.wanted, load_id(from), from.position, from.row, counts));
      poisoned |= unsigned(id[u] == kBad) << u;
    }
  }
#pragma unroll
  for (int u = 0; u < 8; u++) {
    chunk[u] = {};
    if (id[u] >= 0) chunk[u] = load_row(table + uint64_t(uint32_t(id[u])) * table_stride);
  }
  return poisoned;
}

// Bags from `first` on, as many as a warp's lanes take. What does not need the offsets is loaded before them.
__device__ __noinline__ void sum_short_bags(const Launch& launch, const Record& record, int64_t first, int64_t rows) {
  const int log2 = record.group_log2, slot = (threadIdx.x & 31) >> log2, column = threadIdx.x & ((1 << log2) - 1), chunks = int(record.chunks);
  const int64_t row = first + slot * kBeside;
  const PlainIds ids = plain_ids(launch, record);
  const char* table = record.table + (column < chunks ? column : 0) * 16;
  const uint32_t table_stride = uint32_t(record.table_stride);
  ShortBags bags(launch, record, row, rows);
  const int longest = bags.longest();
  Sum sum[kBeside] = {};
  uint4 chunk[8];
  unsigned poisoned = bags.broken;  // a bit a bag
#pragma unroll 1
  for (int k = 0; k < longest && k < kFew; k += kAtATime) {
    const unsigned bad = load_rows(launch, record, ids, table, table_stride, column == 0, [&](int u) {
      const int b = u / kAtATime, at = k + u % kAtATime;
      return IdPlace{bags.begin[b] + at, at, at < bags.count[b], row + b};
    }, chunk);
#pragma unroll
    for (int u = 0; u < 8; u++) {
      Floats::add(sum[u / kAtATime].of, chunk[u], 1.0f);
      poisoned |= (bad >> u & 1) << u / kAtATime;
    }
  }
#pragma unroll 1
  for (int b = 0; b < kBeside && longest > kFew; b++) {  // bag b is the first one here
    const int most = warp_max(bags.count[0]);
#pragma unroll 1
    for (int k = kFew; k < most; k += 8) {
      const unsigned bad = load_rows(launch, record, ids, table, table_stride, column == 0, [&](int u) {
        return IdPlace{bags.begin[0] + k + u, k + u, k + u < bags.count[0], row + b};
      }, chunk);
      poisoned |= unsigned(bad != 0) << b;
#pragma unroll
      for (int u = 0; u < 8; u++) Floats::add(sum[0].of, chunk[u], 1.0f);
    }
    rotate(bags.begin);
    rotate(bags.count);
    rotate(sum);
  }
  char* out = output(launch, record, row, 0) + column * 16;
  const int64_t out_stride = record.out_stride;
#pragma unroll
  for (int b = 0; b < kBeside; b++) {
    auto last = [&](int d) { return finished(record, sum[b].of[d], bags.count[b], poisoned >> b & 1); };
    if (row + b < rows && column < chunks) *reinterpret_cast<float4*>(out + b * out_stride) = float4{last(0), last(1), last(2), last(3)};
  }
}

}  // namespace fxopt::cuda
