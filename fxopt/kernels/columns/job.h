// One column, resolved against the tensors of a call: everything a work item needs, on its stack.
#pragma once
#include <algorithm>

#include "jagged.h"
#include "program.h"

namespace fxopt::FXOPT_ISA {

// Rows of prefetch. A row's first cache line is fetched earlier than the rest, which then finds its page translated.
// 1M x 64, random ids, 1 thread: 11.5 ns an id at 12 and 12, 9.0 at 32 and 32, 7.4 at 40 and 20, 6.9 at 48 and 32, 7.1 at 64 and 48.
constexpr int kAhead = 32, kFarAhead = 48;

struct Table {
  const char* data;
  int64_t rows, dim, row_stride, column_stride;  // bytes
  int dtype;
  bool prefetch;
};

// Rows of a tile's columns, copied together once all are fetched: 0.85 of the time of 1000 columns at batch 1 on cold caches.
struct Later {
  struct Move {
    const char* from;
    char* to;
    int64_t bytes;
    int sum_of;  // the dtype of a row to which zeros are added, or -1
  };
  static constexpr int kMost = 64;
  Move moves[kMost];
  int n = 0;
};

// One value a row: a divisor, or how many lanes count.
struct PerRow {
  View view;
  Program program;
  bool given = false;
};

struct Job {
  const Call* call;
  const Column* column;
  const Extra* extra;
  View ids, weights;
  PerRow divisor, lengths;
  Program program;
  Table table;
  int64_t lanes, dim;  // per row of the output (1 lane when pooled)
  char* out;           // of row 0
  int64_t out_stride;
  int out_dtype;
  const Array* offsets = nullptr;
  int64_t first_bag = 0;
  Later* later = nullptr;

  bool has(Flag flag) const { return column->has(flag); }
  bool divides() const { return divisor.given || has(kCounted); }
  bool fail(const char* what, Error& error) const { return error.fail(column->index, 0, "column %d: %s", column->index, what); }
};

inline int64_t offset_at(const Job& job, int64_t bag) {
  return integer_at(*job.offsets, job.first_bag + bag);
}

// Bag `row` of a jagged column: [begin, end) within the ids, checked.
inline bool bag_range(const Job& job, int64_t row, int64_t& begin, int64_t& end, Error& error) {
  const int64_t bag = job.first_bag + row, n = job.ids.rows;
  begin = offset_at(job, row);
  end = bag + 1 < job.offsets->sizes[0] ? offset_at(job, row + 1) : n;
  if (begin < 0 || end < begin || end > n || (bag == 0 && begin != 0))
    return error.fail(job.column->index, row, "column %d: offsets of bag %lld are [%lld, %lld), expected them to start at 0, "
                      "to grow and to stay within %lld ids", job.column->index, (long long)row, (long long)begin, (long long)end, (long long)n);
  return true;
}

inline bool resolve_bags(Job& job, int64_t rows, Error& error) {
  const Extra& extra = *job.extra;
  if (extra.bag >= job.call->n_tensors) return job.fail("no such offsets tensor", error);
  const Array& offsets = job.call->tensors[extra.bag];
  if (!is_integers(offsets)) return job.fail("offsets must be a 1-D tensor of int32 or int64", error);
  if ((offsets.sizes[0] - extra.include_last) / extra.segments != rows)
    return job.fail("its offsets have another number of bags than the output has rows", error);
  job.offsets = &offsets;
  job.first_bag = extra.segment * rows;
  if (rows == 0 && offsets.sizes[0] > 0 && offset_at(job, 0) != 0) return job.fail("offsets must start at 0", error);
  return true;
}

// torch asks that the last offset is the number of ids, and does not check it. Where it is less, its CPU kernels count the
// ids behind it in the last bag, but for plain sums, which read no further than the offset.
inline bool ends_with_ids(const Job& job, int64_t rows, Error& error) {
  const Extra& extra = *job.extra;
  if (rows == 0 || !extra.include_last || extra.segments != 1) return true;
  const bool sums = job.column->pool == kSum && extra.weights.tensor < 0 && !job.has(kHasPadding);
  if (sums && job.table.dtype != kDouble && job.table.column_stride == element_size(job.table.dtype)) return true;
  return offset_at(job, rows) == job.ids.rows || job.fail("expected the last offset to be the number of ids", error);
}

// The ids of a feature that is not pooled are those of a tensor that begins and ends with them.
inline bool resolve_segment(Job& job, Error& error) {
  const Extra& extra = *job.extra;
  if (extra.bag >= job.call->n_tensors) return job.fail("no such offsets tensor", error);
  int64_t begin = 0, end = 0;
  if (!segment_of(job.call->tensors[extra.bag], extra, job.ids.rows, begin, end))
    return job.fail("offsets must be int32 or int64, grow and stay within the ids", error);
  View& ids = job.ids;
  if (ids.rows > 1) ids.data += begin * ids.stride[2];
  ids.rows = ids.n[2] = end - begin;
  return true;
}

inline bool resolve_table(Job& job, Error& error) {
  const Column& column = *job.column;
  if (column.table >= job.call->n_tables) return job.fail("no such table", error);
  const Array& array = job.call->tables[column.table];
  const bool quantized = array.dtype == kUInt8;
  if (array.dim != 2 || !(quantized || is_floating(array.dtype)))
    return job.fail("a table must be 2-D of float16, bfloat16, float32 or float64, or of rows in 8 bits", error);
  if (quantized && (row_dim(array) < 0 || array.strides[1] != 1)) return job.fail("expected rows of codes, a scale and an offset", error);
  const int size = element_size(array.dtype);
  job.table = {array.data, array.sizes[0], row_dim(array), array.strides[0] * size, array.strides[1] * size, array.dtype, job.call->fetches_ahead};
  job.dim = job.table.dim;
  return true;
}

// A float per id or per row.
inline bool resolve_factor(Job& job, const Source& source, int64_t rows, int64_t lanes, View& view, Error& error) {
  if (!resolve(*job.call, *job.column, source, rows, view, error)) return false;
  if (view.rows != rows || view.lanes != lanes) return job.fail("weights or divisor do not have the shape of the ids or rows", error);
  return true;
}

inline bool resolve_per_row(Job& job, const Source& source, int at, int size, int64_t rows, PerRow& value, Error& error) {
  value.view = View{};
  value.program = {job.call, job.column, &value.view, job.call->plan.instrs + at, size};
  value.given = source.tensor >= 0;
  return !value.given || resolve_factor(job, source, rows, 1, value.view, error);
}

inline bool resolve_extra(Job& job, int64_t rows, Error& error) {
  const Extra& extra = *job.extra;
  if (extra.weights.tensor >= 0 && !resolve_factor(job, extra.weights, job.ids.rows, job.ids.lanes, job.weights, error)) return false;
  return resolve_per_row(job, extra.divisor, extra.divisor_at, extra.divisor_size, rows, job.divisor, error) &&
         resolve_per_row(job, extra.lengths, extra.lengths_at, extra.lengths_size, rows, job.lengths, error);
}

// `job` may have served another column: clearing all of it takes as long as this.
inline bool resolve(const Call& call, const Column& column, Job& job, Error& error) {
  const OutputData& output = call.outputs[column.output];
  job.call = &call;
  job.column = &column;
  job.extra = column.extra < 0 ? nullptr : call.plan.extras + column.extra;
  job.program = {&call, &column, &job.ids, call.plan.instrs + column.program_at, column.program_size};
  job.dim = 1;
  job.weights.data = nullptr;
  job.divisor.given = job.lengths.given = false;
  job.offsets = nullptr;
  job.first_bag = 0;
  if (!resolve(call, column, column.source, output.rows, job.ids, error)) return false;
  const bool segment = column.has(kHasBag) && column.pool == kNone;
  if (segment && !resolve_segment(job, error)) return false;
  if (column.has(kHasBag) && !segment) {
    if (!resolve_bags(job, output.rows, error)) return false;
  } else if (job.ids.rows != output.rows) {
    return error.fail(column.index, 0, "column %d has %lld rows, the output %lld", column.index, (long long)job.ids.rows, (long long)output.rows);
  } else if (column.pool == kMax && job.ids.lanes == 0) {
    return job.fail("max over no ids", error);
  }
  if (column.table >= 0 && !resolve_table(job, error)) return false;
  if (job.offsets && !ends_with_ids(job, output.rows, error)) return false;
  if (job.extra && !resolve_extra(job, output.rows, error)) return false;
  job.lanes = column.pool == kNone ? job.ids.lanes : 1;
  job.out_dtype = call.plan.outputs[column.output].dtype;
  const int size = element_size(job.out_dtype);
  job.out = output.data + column.offset * size;
  job.out_stride = output.width * size;
  int64_t end = 0;
  const bool overflows = __builtin_mul_overflow(job.lanes, job.dim, &end) || __builtin_add_overflow(column.offset, end, &end);
  if (column.offset < 0 || overflows || end > output.width)
    return error.fail(column.index, 0, "column %d writes [%lld, %lld) of an output %lld wide", column.index, (long long)column.offset,
                      (long long)end, (long long)output.width);
  return true;
}

// Which row and lane a bad id at `position` belongs to.
inline bool bad_id(const Job& job, int64_t position, int64_t value, int64_t row0, int64_t row1, Error& error) {
  int64_t row = row0, lane = 0;
  if (job.offsets) {
    int64_t begin = 0, end = 0;
    for (; row < row1; row++) {
      if (!bag_range(job, row, begin, end, error)) return false;
      if (position < end) break;
    }
    lane = position - begin;
  } else {
    row = position / job.ids.lanes;
    lane = position % job.ids.lanes;
  }
  return error.fail(job.column->index, row, "fxopt-bad-id column=%d row=%lld lane=%lld value=%lld rows=%lld", job.column->index,
                    (long long)row, (long long)lane, (long long)value, (long long)job.table.rows);
}

// The ids of positions [position, position + n), in v.i, all within the table. Rows are for the error only.
// `counts` as in Program::run.
inline bool eval_ids(const Job& job, int64_t position, int n, int64_t row0, int64_t row1, Value& v, Error& error, uint8_t* counts = nullptr) {
  if (!job.program.run(position, n, v, error, counts)) return false;
  if (!v.is_int()) return job.fail("ids must be integers after the program", error);
  const int64_t rows = job.table.rows;
  if (job.has(kWrapNegative)) {
    uint64_t bad = 0;
    for (int k = 0; k < n; k++) bad |= uint64_t(v.i[k] < -rows) | uint64_t(v.i[k] >= rows);
    if (!bad) {
      for (int k = 0; k < n; k++) v.i[k] += v.i[k] < 0 ? rows : 0;
      return true;
    }
    for (int k = 0; k < n; k++)
      if (v.i[k] < -rows || v.i[k] >= rows) return bad_id(job, position + k, v.i[k], row0, row1, error);
  }
  uint64_t bad = 0;
  for (int k = 0; k < n; k++) bad |= uint64_t(uint64_t(v.i[k]) >= uint64_t(rows));
  if (!bad) return true;
  for (int k = 0; k < n; k++)
    if (uint64_t(v.i[k]) >= uint64_t(rows)) return bad_id(job, position + k, v.i[k], row0, row1, error);
  return true;
}

// How many of `lanes` lanes l have l < length, for each row's length.
inline void lanes_below(Value& v, int n, int64_t lanes) {
  auto below = [&](auto x) { return x > 0 ? (x < lanes ? int64_t(std::ceil(x)) : lanes) : 0; };  // NaN: none
  alignas(64) int64_t found[kTile];
  for (int k = 0; k < n; k++) found[k] = v.is_int() ? std::min(std::max(v.i[k], int64_t(0)), lanes) : v.is_double() ? below(v.d[k]) : below(v.f[k]);
  memcpy(v.i, found, n * sizeof(int64_t));
}

// eval_ids of a masked column: counts[k] tells whether that lane counts.
inline bool eval_masked(const Job& job, int64_t position, int n, int64_t row0, int64_t row1, Value& v, uint8_t* counts, Error& error) {
  memset(counts, 1, n);
  if (!eval_ids(job, position, n, row0, row1, v, error, counts)) return false;
  if (!job.lengths.given) return true;
  const int64_t lanes = job.ids.lanes, first = position / lanes, last = (position + n - 1) / lanes;
  Value lengths;
  if (!job.lengths.program.run(first, int(last - first + 1), lengths, error)) return false;
  lanes_below(lengths, int(last - first + 1), lanes);
  for (int64_t row = first; row <= last; row++) {
    const int64_t begin = std::max(row * lanes + lengths.i[row - first], position), end = std::min((row + 1) * lanes, position + n);
    for (int64_t at = begin; at < end; at++) counts[at - position] = 0;
  }
  return true;
}

// The divisor of one row, of whose lanes `kept` count.
template <class A>
inline bool divisor_of(const Job& job, int64_t row, int64_t kept, A& by, Error& error) {
  Value v;
  if (job.has(kCounted)) {
    v.dtype = kInt64;
    v.i[0] = kept;
    if (!job.divisor.program.apply(row, 1, v, error)) return false;
  } else if (!job.divisor.program.run(row, 1, v, error)) {
    return false;
  }
  by = v.is_int() ? A(v.i[0]) : v.is_double() ? A(v.d[0]) : A(v.f[0]);
  return true;
}

}  // namespace fxopt::FXOPT_ISA
