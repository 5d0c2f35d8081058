// Plain bags of few ids, in float32. A bag alone waits for its offsets, its ids and its rows in turn, and has few rows on
// their way; so the lanes of a row take kBeside bags one after another as one run of ids, eight of it at a time, wherever a bag
// ends. (Two ids of each of four at a time wait for the longest one: 93 us where bags of 0 to 44 ids took 83 one by one.)
// A bag's ids are added in their order. What is not as it should be, and long bags, all lanes take together: see apart.
#pragma once
#include "pool.cuh"

namespace fxopt::cuda {

constexpr int kRun = 8;    // ids of a run at a time; a thread has as many rows on their way
constexpr int kLong = 64;  // ids; a longer bag would hold up those of other lanes

// Integers of either width, on their way: what is done to one as it comes would wait for it before the next is loaded. So
// those of 32 bits are not extended by their sign: negative ones become 2^31 or more.
template <int N>
struct Integers {
  uint32_t low[N], high[N];
  bool wide;

  // From at(k), where there(k); elsewhere -1.
  template <class At, class There>
  FXOPT_DEVICE void load(At at, There there) {
#pragma unroll
    for (int k = 0; k < N; k++) low[k] = high[k] = ~0u;
    if (wide) {
#pragma unroll
      for (int k = 0; k < N; k++)
        if (there(k)) {
          const auto both = uint64_t(load_as<long long>(at(k)));
          low[k] = uint32_t(both);
          high[k] = uint32_t(both >> 32);
        }
    } else {
#pragma unroll
      for (int k = 0; k < N; k++)
        if (there(k)) {
          low[k] = load_as<unsigned>(at(k));
          high[k] = 0;
        }
    }
  }
  FXOPT_DEVICE int64_t operator[](int k) const { return int64_t(uint64_t(high[k]) << 32 | low[k]); }
};

// The bags of the lanes of a row: bag b has ids [start[b], start[b + 1]) of the run, which lie `shift[b]` further on among all.
struct Run {
  int start[kBeside + 1], shift[kBeside];
  unsigned apart;  // bags that the run leaves out, a bit each

  FXOPT_DEVICE Run(const Launch& launch, const Rare& rare, int64_t row, int64_t rows) : start{}, apart(0) {
    const int64_t n = launch.words[rare.bounds_word], n_offsets = launch.words[rare.bounds_word + 1], first = rare.segment * rows;
    const char* offsets = reinterpret_cast<const char*>(launch.words[rare.offsets_word]);
    const char* from[kBeside + 1];
    Integers<kBeside + 1> found;
    found.wide = rare.offsets_dtype == kInt64;
#pragma unroll
    for (int b = 0; b <= kBeside; b++) {
      const int64_t number = first + (row + b < rows ? row + b : rows);  // bags that are not there are empty
      from[b] = offsets + (number < n_offsets ? number : n_offsets - 1) * rare.offsets_stride;
    }
    found.load([&](int b) { return from[b]; }, [](int) { return true; });
    int64_t bound[kBeside + 1];
#pragma unroll
    for (int b = 0; b <= kBeside; b++) bound[b] = first + (row + b < rows ? row + b : rows) < n_offsets ? found[b] : n;
    const bool late = first + row == 0 && bound[0] != 0;
#pragma unroll
    for (int b = 0; b < kBeside; b++) {
      const int64_t begin = bound[b], end = bound[b + 1];
      const bool one_of_run = begin >= 0 && begin <= end && end <= n && end - begin <= kLong && !(b == 0 && late);
      if (!one_of_run && row + b < rows) apart |= 1u << b;
      start[b + 1] = start[b] + (one_of_run ? int(end - begin) : 0);
      shift[b] = int(begin) - start[b];
    }
  }

  // Where the id at `k` of the run is among all.
  FXOPT_DEVICE int place(int k) const {
    int by = shift[0];
#pragma unroll
    for (int b = 1; b < kBeside; b++) by = k >= start[b] ? shift[b] : by;
    return k + by;
  }
};

// Bags from `first` on, as many as a warp's lanes take; returns which of a lane's are left out. What does not need the offsets is loaded before them.
__device__ __noinline__ unsigned sum_short_bags(const Launch& launch, const Record& its_record, int64_t first, int64_t rows) {
  const int log2 = its_record.group_log2, slot = (threadIdx.x & 31) >> log2, column = threadIdx.x & ((1 << log2) - 1);
  const int64_t row = first + slot * kBeside;
  const PlainIds ids = plain_ids(launch, its_record);
  const char* table = its_record.table + (column < int(its_record.chunks) ? column : 0) * 16;
  const uint32_t table_stride = uint32_t(its_record.table_stride);
  Run run(launch, launch.rares[its_record.extra], row, rows);
  const int all = run.start[kBeside];
  Integers<kRun> next;  // on their way while rows before them are added
  next.wide = ids.wide;
  const uint32_t table_rows = ids.table_rows;
  auto load_next = [&](int from) {
    next.load([&](int u) { return ids.data + int64_t(run.place(from + u)) * ids.stride; }, [&](int u) { return from + u < all; });
  };
  float sum[kBeside][Floats::kSize] = {};
  load_next(0);
#pragma unroll 1
  for (int k = 0; k < all; k += kRun) {
    uint4 chunk[kRun];
    unsigned bad = 0;
#pragma unroll
    for (int u = 0; u < kRun; u++) {
      const bool good = next.high[u] == 0 && next.low[u] < table_rows;
      if (k + u < all && !good) bad |= 1u << u;
      chunk[u] = {};
      if (good) chunk[u] = load_row(table + uint64_t(next.low[u]) * table_stride);
    }
    load_next(k + kRun);
#pragma unroll
    for (int b = 0; b < kBeside; b++) {
      const int from = run.start[b] > k ? run.start[b] - k : 0, end = run.start[b + 1] < k + kRun ? run.start[b + 1] - k : kRun;
      if (from >= end) continue;
#pragma unroll
      for (int u = 0; u < kRun; u++)
        if (u >= from && u < end) Floats::add(sum[b], chunk[u], 1.0f);
      if (bad >> from & ((1u << (end - from)) - 1)) run.apart |= 1u << b;
    }
  }
  const Record record = its_record;  // for all that the compiler knows, what is stored here could change it
  char* out = output(launch, record, row, 0) + column * 16;
#pragma unroll
  for (int b = 0; b < kBeside; b++) {
    auto last = [&](int d) { return finished(record, sum[b][d], run.start[b + 1] - run.start[b], false); };
    if (row + b < rows && column < int(record.chunks)) *reinterpret_cast<float4*>(out + b * record.out_stride) = float4{last(0), last(1), last(2), last(3)};
  }
  return run.apart;
}

// And those that it leaves out. (It does not call this itself: there would be no registers for what both keep.)
FXOPT_DEVICE void run_short_bags(const Launch& launch, const Record& record, int64_t first, int64_t rows) {
  unsigned apart = sum_short_bags(launch, record, first, rows);
  __syncwarp();
  while (const unsigned lanes = __ballot_sync(kAll, apart != 0)) {
    const int lane = __ffs(int(lanes)) - 1, slot = lane >> record.group_log2, b = __ffs(__shfl_sync(kAll, int(apart), lane)) - 1;
    if (int(threadIdx.x & 31) >> record.group_log2 == slot) apart &= apart - 1;
    pool_bags<Floats, kPlainIds>(launch, record, first + slot * kBeside + b, rows, 32, {0, 1, 32, nullptr});
  }
}

}  // namespace fxopt::cuda
