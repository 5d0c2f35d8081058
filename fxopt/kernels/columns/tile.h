// One work item: the columns of a tile over a range of rows.
#pragma once
#include "backward.h"
#include "bags.h"
#include "gather.h"
#include "pool.h"
#include "values.h"

namespace fxopt::FXOPT_ISA {

constexpr int64_t kFewRows = 32;
constexpr int kColumnsAhead = 6;

inline bool run_column(const Job& job, int64_t row0, int64_t row1, Error& error) {
  if (job.column->table < 0) {
    if (!is_move(job)) return compute_values(job, row0, row1, error);
    move_values(job, row0, row1);
    return true;
  }
  if (is_gather(job)) return gather(job, row0, row1, error);
  return is_plain_bags(job) ? sum_plain_bags(job, row0, row1, error) : pool(job, row0, row1, error);
}

// Starts the loads of a column's values and boundaries while earlier columns compute: with few rows, a call is
// bound by the latency of touching a thousand small arrays. Inlined for the reason that Pooling's prefetch is: 1-4% of
// 1000 bucketized columns at batch 1.
[[gnu::always_inline]] inline void prefetch_inputs(const Call& call, const Column& column) {
  if (uint64_t(column.source.tensor) < uint64_t(call.n_tensors)) __builtin_prefetch(call.tensors[column.source.tensor].data);
  for (int s = column.program_at; s < column.program_at + column.program_size; s++) {
    const int64_t tensor = call.plan.instrs[s].tensor;
    if (uint64_t(tensor) >= uint64_t(call.n_tensors)) continue;
    const Array& array = call.tensors[tensor];
    if (array.dim != 1) continue;
    const int64_t bytes = array.sizes[0] * element_size(array.dtype);
    for (int64_t line = 0; line < bytes && line < 512; line += 64) __builtin_prefetch(array.data + line);
  }
}

static bool run_tile(const Call& call, const Tile& tile, int64_t row0, int64_t row1, Error& error) {
  const bool few = row1 - row0 <= kFewRows;
  Later later;
  Job job;
  job.later = few ? &later : nullptr;
  for (int c = tile.first; c < tile.first + tile.count; c++) {
    if (few && c + kColumnsAhead < call.plan.header->n_columns) prefetch_inputs(call, call.plan.columns[c + kColumnsAhead]);
    const Column& column = call.plan.columns[c];
    if (!resolve(call, column, job, error)) return false;
    if (column.has(kAdd)) copy_now(later);
    if (row0 < row1 && !run_column(job, row0, row1, error)) return false;
  }
  copy_now(later);
  return true;
}

extern const Kernels kernels = {run_tile, run_scatter, run_list, sum_entries};

}  // namespace fxopt::FXOPT_ISA
