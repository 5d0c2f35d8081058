// A bad id is written down, never followed and never an assert: the host reads it when it next looks.
#pragma once
#include "program.cuh"

namespace fxopt::cuda {

constexpr int kNoId = -1, kBad = -2;

// The first failure by (column, row) wins, as on the CPU. One thread of a warp calls this.
__device__ __noinline__ void report(Errors* errors, Failure failure) {
  const unsigned long long key = (static_cast<unsigned long long>(failure.column) << 40 | static_cast<unsigned long long>(failure.row)) + 1;
  auto late = [&] {
    const unsigned long long known = *reinterpret_cast<volatile unsigned long long*>(&errors->key);
    return known != 0 && known <= key;
  };
  if (late()) return;
  while (atomicCAS(&errors->lock, 0u, 1u) != 0u) {}
  __threadfence();
  if (!late()) {
    volatile Failure* out = errors->report;
    out->column = failure.column;
    out->row = failure.row;
    out->lane = failure.lane;
    out->value = failure.value;
    out->rows = failure.rows;
    out->plan = failure.plan;
    __threadfence_system();
    out->kind = failure.kind;
    *reinterpret_cast<volatile unsigned long long*>(&errors->key) = key;
  }
  __threadfence();
  atomicExch(&errors->lock, 0u);
}

// The first thread of the warp whose `bad` holds reports its failure. All 32 threads call it.
FXOPT_DEVICE void report_first(const Launch& launch, bool bad, Failure failure) {
  const unsigned threads = __ballot_sync(kAll, bad);
  failure.plan = launch.plan;
  if (threads && int(threadIdx.x & 31) == __ffs(int(threads)) - 1) report(launch.errors, failure);
  __syncwarp();
}

__device__ __noinline__ void report_id(const Launch& launch, const Record& record, bool bad, int64_t value, int64_t position, int64_t row) {
  const int64_t lanes = record.lanes;
  Failure failure{kBadId, record.index, row, position, value, record.table_rows, 0};
  if (row < 0) {
    failure.row = lanes == 1 ? position : position / lanes;
    failure.lane = record.lane + position - failure.row * lanes;
  }
  report_first(launch, bad, failure);
}

// Whether a row is the caller's own: a captured graph pads its batch, and `real_rows` says how much of it is real now.
FXOPT_DEVICE bool is_real(const Launch& launch, const Record& record, int64_t row) {
  if (!launch.real_rows) return true;
  int s = 0;
  while (s + 1 < launch.n_segments && &record - launch.records >= launch.segments[s + 1].first_unit) s++;
  return row * launch.capacity < __ldg(launch.real_rows) * launch.segments[s].rows;  // a column may have several rows for one of the batch
}

// The row of the table for an id; kNoId where there is none (not `wanted`), kBad for one outside. All 32 threads call it.
// `position` is that in the bag of `row`, or (row -1) that of a column without bags; `counts`: as one that "clamp" moves.
__device__ __noinline__ int64_t checked(const Launch& launch, const Record& record, bool wanted, int64_t id, int64_t position, int64_t row = -1, bool counts = true) {
  const int64_t rows = record.table_rows, value = id;
  if ((record.flags & kWrapNegative) && id < 0) id += rows;
  if (!wanted) id = kNoId;
  const bool bad = wanted && uint64_t(id) >= uint64_t(rows);
  if (launch.mode == kUnchecked || !__any_sync(kAll, bad)) return id;
  if (launch.mode == kClamp && __all_sync(kAll, !bad || rows > 0)) {  // threads may have records of their own
    if (bad && counts && is_real(launch, record, row < 0 ? position / record.lanes : row)) atomicAdd(&launch.errors->clamped, 1ull);
    return bad ? (id < 0 ? 0 : rows - 1) : id;
  }
  report_id(launch, record, bad, value, position, row);
  return bad ? kBad : id;
}

}  // namespace fxopt::cuda
