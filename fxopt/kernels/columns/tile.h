// One work item: the columns of a tile over a range of rows.
#pragma once
#include "backward.h"
#include "gather.h"
#include "pool.h"

namespace fxopt::FXOPT_ISA {

inline bool run_column(const Job& job, int64_t row0, int64_t row1, Error& error) {
  if (job.column->table < 0) {
    if (!is_move(job)) return compute_values(job, row0, row1, error);
    move_values(job, row0, row1);
    return true;
  }
  return is_gather(job) ? gather(job, row0, row1, error) : pool(job, row0, row1, error);
}

static bool run_tile(const Call& call, const Tile& tile, int64_t row0, int64_t row1, Error& error) {
  for (int c = tile.first; c < tile.first + tile.count; c++) {
    Job job;
    if (!resolve(call, call.plan.columns[c], job, error)) return false;
    if (row0 < row1 && !run_column(job, row0, row1, error)) return false;
  }
  return true;
}

extern const Kernels kernels = {run_tile, run_scatter};

}  // namespace fxopt::FXOPT_ISA
