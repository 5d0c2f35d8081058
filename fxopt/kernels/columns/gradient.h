// The backward's work items: a range of rows of one table's gradient, and every column that reads the table.
#pragma once
#include <cstring>
#include <mutex>
#include <vector>

#include "../threads.h"
#include "call.h"
#include "zeros.h"

namespace fxopt {

inline void scatter_range(
    const Call& call, const Kernels& kernels, const std::vector<int>& columns, char* out, const Array& table, int64_t begin, int64_t end, Error& error) {
  const int64_t row_bytes = table.sizes[1] * (table.dtype == kDouble ? 8 : 4);
  if (!starts_as_zeros(table)) memset(out + begin * row_bytes, 0, (end - begin) * row_bytes);
  for (int column : columns)
    if (!kernels.run_scatter(call, column, out, begin, end, error)) return;
}

// The columns that read each table.
inline std::vector<std::vector<int>> columns_of_tables(const Call& call) {
  std::vector<std::vector<int>> columns(call.n_tables);
  for (int64_t c = 0; c < call.plan.header->n_columns; c++) {
    const int64_t table = call.plan.columns[c].table;
    if (table < 0 || table >= call.n_tables) refused("fxopt.columns_backward: column %lld has no table", (long long)c);
    columns[table].push_back(int(c));
  }
  return columns;
}

// Few tables: their rows are split too, and each shard scans all ids.
inline int64_t shards_of(const Call& call) {
  const int64_t threads = torch::stable::get_num_threads();
  return call.n_tables >= 4 * threads ? 1 : threads;
}

// run(item, error) for each item, on all threads; the error of the first column.
template <class F>
inline void for_items(int64_t n, Error& error, F run) {
  std::mutex mutex;
  as_they_come(n, torch::stable::get_num_threads(), 1, [&](int64_t item, int64_t) {
    Error here;
    run(item, here);
    std::lock_guard<std::mutex> lock(mutex);
    if (here.failed() && here.before(error)) error = here;
  });
}

inline void scatter_all(const Call& call, const Kernels& kernels, const std::vector<char*>& outs, Error& error) {
  const auto columns = columns_of_tables(call);
  const int64_t shards = shards_of(call);
  for_items(call.n_tables * shards, error, [&](int64_t item, Error& here) {
    const Array& table = call.tables[item / shards];
    const int64_t rows = table.sizes[0], shard = item % shards;
    if (table.dtype != kFloat && table.dtype != kDouble) here.fail(0, 0, "fxopt.columns_backward: tables are float32 or float64");
    else scatter_range(call, kernels, columns[item / shards], outs[item / shards], table, rows * shard / shards, rows * (shard + 1) / shards, here);
  });
}

}  // namespace fxopt
