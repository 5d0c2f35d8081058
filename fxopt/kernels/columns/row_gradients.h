// Gradients of tables as the rows that are touched: entries of all ids, a stable sort by id, sums. They are the dense
// gradient's bits, because a row's entries are added in the same order.
#pragma once
#include <memory>

#include "gradient.h"
#include "schedule.h"

namespace fxopt {

constexpr int kDigit = 11;  // bits; two passes for 4M rows

// The entries of rows [begin, end) of a table, in the order of their ids.
struct Shard {
  std::unique_ptr<Entry[]> memory, spare;
  Entries list{nullptr, 0, 0};
  int64_t begin = 0, end = 0, touched = 0;

  void sort() {
    for (int shift = 0; (end - begin - 1) >> shift > 0; shift += kDigit) {
      int64_t places[(1 << kDigit) + 1] = {};
      const auto digit = [&](int64_t k) { return ((memory[k].id - begin) >> shift) & ((1 << kDigit) - 1); };
      for (int64_t k = 0; k < list.n; k++) places[digit(k) + 1]++;
      for (int d = 0; d < (1 << kDigit); d++) places[d + 1] += places[d];
      for (int64_t k = 0; k < list.n; k++) spare[places[digit(k)]++] = memory[k];
      std::swap(memory, spare);
    }
    list.data = memory.get();
    spare.reset();
  }

  void count() {
    for (int64_t k = 0; k < list.n; k++) touched += k == 0 || list.data[k].id != list.data[k - 1].id;
  }
};

// At most this many entries come of a column.
inline int64_t most_entries(const Call& call, const Column& column) {
  if (column.has(kHasBag)) return size_of(tensor_at(call, column.source.tensor), 0);
  return call.outputs[column.output].rows * lanes_of(call, column.source);
}

inline void list_shard(const Call& call, const Kernels& kernels, const std::vector<int>& columns, Shard& shard, Error& error) {
  for (int column : columns) shard.list.capacity += most_entries(call, call.plan.columns[column]);
  shard.memory.reset(new Entry[shard.list.capacity]);
  shard.spare.reset(new Entry[shard.list.capacity]);
  shard.list.data = shard.memory.get();
  for (int column : columns)
    if (!kernels.run_list(call, column, shard.list, shard.begin, shard.end, error)) return;
  shard.sort();
  shard.count();
}

// allocate(table, touched) gives memory for the rows' numbers and for their gradients.
template <class Allocate>
inline void row_gradients(const Call& call, const Kernels& kernels, Error& error, Allocate allocate) {
  const auto columns = columns_of_tables(call);
  const int64_t per_table = shards_of(call);
  std::vector<Shard> shards(call.n_tables * per_table);
  for_items(int64_t(shards.size()), error, [&](int64_t item, Error& here) {
    const int64_t table = item / per_table, rows = call.tables[table].sizes[0], at = item % per_table;
    shards[item].begin = rows * at / per_table, shards[item].end = rows * (at + 1) / per_table;
    list_shard(call, kernels, columns[table], shards[item], here);
  });
  if (error.failed()) return;
  struct Place {
    int64_t* rows;
    char* values;
  };
  std::vector<Place> places(shards.size());
  for (int64_t table = 0; table < call.n_tables; table++) {
    int64_t touched = 0;
    for (int64_t at = 0; at < per_table; at++) touched += shards[table * per_table + at].touched;
    const Array& array = call.tables[table];
    const int64_t bytes = array.sizes[1] * (array.dtype == kDouble ? 8 : 4);
    auto [rows, values] = allocate(array, touched);
    for (int64_t at = 0; at < per_table; at++) {
      const int64_t item = table * per_table + at;
      places[item] = {rows, values};
      rows += shards[item].touched, values += shards[item].touched * bytes;
    }
  }
  for_items(int64_t(shards.size()), error, [&](int64_t item, Error&) {
    const Array& table = call.tables[item / per_table];
    kernels.sum_entries(shards[item].list, table.dtype, table.sizes[1], places[item].rows, places[item].values);
  });
}

}  // namespace fxopt
