// What a plan and the tensors of a call say of sizes, on every device. Only the outputs of features that are not pooled depend
// on numbers in a tensor, their offsets.
#pragma once
#include <algorithm>

#include "jagged.h"

namespace fxopt {

inline void expect_plan(bool holds, const char* what) {
  if (!holds) refused("fxopt.columns: expected a plan made by encode(), found %s", what);
}

inline bool within(int64_t at, int64_t size, int64_t n) { return at >= 0 && size >= 0 && at <= n - size; }

// The records lie inside of the n words.
inline void check_counts(const int64_t* words, int64_t n) {
  expect_plan(n >= int64_t(sizeof(Header) / sizeof(int64_t)) && words[0] == kVersion, "another tensor");
  for (int k = 1; k < 7; k++) expect_plan(words[k] >= 0 && words[k] <= n, "a number of records");
  const Plan plan(words);
  expect_plan(reinterpret_cast<const int64_t*>(plan.tiles + plan.header->n_tiles) - words <= n, "one that was cut off");
}

inline const Array& tensor_at(const Given& given, int64_t index) {
  if (index < 0 || index >= given.n_tensors)
    refused("fxopt.columns: the plan reads tensor %lld of %lld", (long long)index, (long long)given.n_tensors);
  return given.tensors[index];
}

inline int64_t size_of(const Array& array, int64_t dim) {
  if (dim < 0 || dim >= array.dim) refused("fxopt.columns: the plan reads dim %lld of a tensor with %lld dims", (long long)dim, (long long)array.dim);
  return array.sizes[dim];
}

inline int64_t lanes_of(const Given& given, const Source& source) {
  if (source.lane < 0) return 1;
  return source.length >= 0 ? source.length : size_of(tensor_at(given, source.tensor), source.lane) - source.start;
}

inline int64_t dim_of(const Given& given, const Column& column) {
  if (column.table < 0) return 1;
  if (column.table >= given.n_tables)
    refused("fxopt.columns: the plan reads table %lld of %lld", (long long)column.table, (long long)given.n_tables);
  const Array& table = given.tables[column.table];
  if (table.dim != 2) refused("fxopt.columns: table %lld has %d dims, expected 2", (long long)column.table, table.dim);
  return std::max<int64_t>(0, row_dim(table));
}

inline OutputData measure(const Given& given, const Output& output) {
  const Column& column = given.plan.columns[output.measured];
  const Array& array = tensor_at(given, column.source.tensor);
  OutputData result{nullptr, 0, output.width};
  if (column.has(kHasBag) && column.pool == kNone) {
    const Extra& extra = given.plan.extras[column.extra];
    int64_t begin = 0, end = 0;
    if (!segment_of(tensor_at(given, extra.bag), extra, size_of(array, 0), begin, end)) refused("fxopt.columns: offsets must grow and stay within the ids");
    result.rows = end - begin;
  } else if (column.has(kHasBag)) {
    const Extra& extra = given.plan.extras[column.extra];
    const int64_t rows = size_of(tensor_at(given, extra.bag), 0) - extra.include_last;
    if (rows < 0 || rows % extra.segments)
      refused("fxopt.columns: %lld offsets for %lld features", (long long)rows, (long long)extra.segments);
    result.rows = rows / extra.segments;
  } else {
    result.rows = size_of(array, column.source.row0) * (column.source.row1 < 0 ? 1 : size_of(array, column.source.row1));
  }
  if (output.width < 0) result.width = product(column.pool == kNone ? lanes_of(given, column.source) : 1, dim_of(given, column));
  if (result.width < 0) refused("fxopt.columns: negative number of lanes");
  return result;
}

}  // namespace fxopt
