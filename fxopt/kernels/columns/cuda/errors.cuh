// A bad id is written down, never followed and never an assert: the host reads it when it next looks.
#pragma once
#include "program.cuh"

namespace fxopt::cuda {

// The first failure by (column, row) wins, as on the CPU. One thread of a warp calls this.
FXOPT_DEVICE void report(Errors* errors, const Failure& failure) {
  const unsigned long long key = (static_cast<unsigned long long>(failure.column) << 40 | failure.row) + 1;
  auto worse = [&] {
    const unsigned long long known = *reinterpret_cast<volatile unsigned long long*>(&errors->key);
    return known != 0 && known <= key;
  };
  if (worse()) return;
  while (atomicCAS(&errors->lock, 0u, 1u) != 0u) {}
  __threadfence();
  if (!worse()) {
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
FXOPT_DEVICE void report_first(Errors* errors, bool bad, const Failure& failure) {
  const unsigned threads = __ballot_sync(kAll, bad);
  if (threads && int(threadIdx.x & 31) == __ffs(int(threads)) - 1) report(errors, failure);
  __syncwarp();
}

// A row of the table for an id, -1 for none (padding handled elsewhere). All 32 threads call it; `wanted`: there is an id.
template <class L>
FXOPT_DEVICE int64_t checked(const L& launch, const Record& record, bool wanted, int64_t id, int64_t row, int64_t lane) {
  const int64_t rows = record.table_rows, value = id;
  if ((record.flags & kWrapNegative) && id < 0) id += rows;
  const int mode = launch.head.mode;
  if (mode == kUnchecked) return wanted ? id : -1;
  const bool bad = wanted && uint64_t(id) >= uint64_t(rows);
  if (!__any_sync(kAll, bad)) return wanted ? id : -1;
  if (mode == kClamp && rows > 0) {
    if (bad) {
      atomicAdd(&launch.head.errors->clamped, 1ull);
      id = id < 0 ? 0 : rows - 1;
    }
    return wanted ? id : -1;
  }
  report_first(launch.head.errors, bad, {kBadId, record.index, row, lane, value, rows, launch.head.plan});
  return bad ? -2 : wanted ? id : -1;
}

}  // namespace fxopt::cuda
