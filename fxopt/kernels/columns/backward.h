// Gradients of tables: rows of the output's gradient, scattered. One worker owns a range of a table's rows, so
// nothing is atomic and the order of additions is that of the ids.
#pragma once
#include "job.h"

namespace fxopt::FXOPT_ISA {

template <class A>
inline A number_at(const char* data, int dtype, int64_t k) {
  switch (dtype) {
    case kFloat: return A(reinterpret_cast<const float*>(data)[k]);
    case kDouble: return A(reinterpret_cast<const double*>(data)[k]);
    case kHalf: return A(widen(reinterpret_cast<const Half*>(data)[k]));
    default: return A(widen(reinterpret_cast<const BFloat16*>(data)[k]));
  }
}

template <class A>
inline void add_row(A* to, const char* from, int dtype, int64_t dim, A scale) {
  if (dtype == (sizeof(A) == 4 ? kFloat : kDouble)) {
    const A* values = reinterpret_cast<const A*>(from);
    for (int64_t d = 0; d < dim; d++) to[d] += scale * values[d];
  } else {
    for (int64_t d = 0; d < dim; d++) to[d] += scale * number_at<A>(from, dtype, d);
  }
}

// Writes nothing new. A page of zeros that is read first and then written faults twice, and the second fault stops the
// other threads: 60,000 rows of a gradient of 400 MB take 545 ms instead of 67.
inline void expect_write(char* byte) {
#if defined(__x86_64__)
  asm volatile("orb $0, %0" : "+m"(*byte));
#else
  __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
#endif
}

// Where a scatter's rows go: at once into a dense gradient [rows, dim] ...
template <class A>
struct Dense {
  A* out;
  void expect(int64_t id, int64_t dim) {
    char* row = reinterpret_cast<char*>(out + id * dim);
    const int64_t bytes = dim * sizeof(A);
    for (int64_t at = 0; at < bytes; at += 4096) expect_write(row + at);
    if (bytes > 0) expect_write(row + bytes - 1);
  }
  void add(int64_t id, const char* from, int dtype, int64_t dim, A scale) { add_row(out + id * dim, from, dtype, dim, scale); }
};

// ... or onto a list, of which sum_entries() makes the rows that are touched.
template <class A>
struct Listed {
  Entries& list;
  void expect(int64_t, int64_t) {}
  void add(int64_t id, const char* from, int dtype, int64_t, A scale) {
    if (list.n < list.capacity) list.data[list.n] = {id, from, double(scale), dtype, 0};
    list.n++;
  }
};

// Hands on scale * grad for each id of the column that lies in rows [begin, end) of the table.
template <class A, class Sink>
struct Scatter {
  const Job& job;
  Sink sink;
  int64_t begin, end;
  Value v, w;
  uint8_t counts[kTile];

  static A value_at(const Value& x, int k) { return x.is_int() ? A(x.i[k]) : x.is_double() ? A(x.d[k]) : A(x.f[k]); }

  A grad_at(int64_t row, int64_t k) const { return number_at<A>(job.out + row * job.out_stride, job.out_dtype, k); }

  void add(int64_t id, int64_t row, int64_t lane, A scale) {
    sink.add(id, job.out + row * job.out_stride + lane * job.dim * element_size(job.out_dtype), job.out_dtype, job.dim, scale);
  }

  // How many of the lanes [from, to) count: all but masked lanes, or all but padding.
  bool count_lanes(int64_t row, int64_t from, int64_t to, int64_t& masked, int64_t& padding, Error& error) {
    masked = padding = 0;
    for (int64_t at = from; at < to; at += kTile) {
      const int n = to - at < kTile ? int(to - at) : kTile;
      if (!eval_masked(job, at, n, row, row + 1, v, counts, error)) return false;
      for (int k = 0; k < n; k++) masked += !counts[k];
      for (int k = 0; k < n && job.has(kHasPadding); k++) padding += v.i[k] == job.column->padding;
    }
    return true;
  }

  // What a row of the result was divided by: the mean's count and the divisor.
  bool row_scale(int64_t row, int64_t from, int64_t to, A& scale, Error& error) {
    int64_t masked = 0, padding = 0;
    scale = 1;
    if ((job.has(kCounted) || job.has(kHasPadding)) && !count_lanes(row, from, to, masked, padding, error)) return false;
    if (job.column->pool == kMean) scale /= A(to - from == padding ? 1 : to - from - padding);
    A by = 1;
    if (job.divides() && !divisor_of(job, row, to - from - masked, by, error)) return false;
    scale /= by;
    return true;
  }

  // Whether 0 * grad is not zero somewhere, so that eager gives NaN to the rows of lanes it multiplied by 0.
  bool zero_times_grad_is_nan(int64_t row, A scale) const {
    A sum = 0;
    for (int64_t d = 0; d < job.dim; d++) sum += 0 * (scale * grad_at(row, d));
    return sum != 0;
  }

  // The ids in v, before their rows are added.
  void expect(int n) {
    for (int k = 0; k < n; k++)
      if (!without_gradient(v.i[k])) sink.expect(v.i[k], job.dim);
  }

  bool without_gradient(int64_t id) const {
    return id < begin || id >= end || (job.has(kHasPadding) && id == job.column->padding) || (job.has(kHasFrozen) && id == job.extra->frozen);
  }

  bool run(int64_t rows, Error& error) {
    const bool lookup = job.column->pool == kNone, scaled = job.column->pool == kMean || job.divides(), masked = job.has(kIsMasked);
    if (!job.offsets && !scaled && !masked && !job.weights.data && job.ids.lanes == 1) return run_single(rows, error);
    for (int64_t row = 0; row < rows; row++) {
      int64_t from = row * job.ids.lanes, to = from + job.ids.lanes;
      if (job.offsets && !bag_range(job, row, from, to, error)) return false;
      A scale = 1;
      if (scaled && !row_scale(row, from, to, scale, error)) return false;
      const bool all = masked && job.column->masked == kScaled && zero_times_grad_is_nan(row, scale);
      for (int64_t at = from; at < to; at += kTile) {
        const int n = to - at < kTile ? int(to - at) : kTile;
        if (!(masked ? eval_masked(job, at, n, row, row + 1, v, counts, error) : eval_ids(job, at, n, row, row + 1, v, error))) return false;
        if (job.weights.data) load(job.weights, at, n, w);
        expect(n);
        for (int k = 0; k < n; k++) {
          const bool left_out = masked && !counts[k];
          if (without_gradient(v.i[k]) || (left_out && !all)) continue;
          add(v.i[k], row, lookup ? at - from + k : 0, job.weights.data ? scale * value_at(w, k) : left_out ? scale * 0 : scale);
        }
      }
    }
    return true;
  }

  // One id a row, no scale: a tile of rows at a time.
  bool run_single(int64_t rows, Error& error) {
    for (int64_t at = 0; at < rows; at += kTile) {
      const int n = rows - at < kTile ? int(rows - at) : kTile;
      if (!eval_ids(job, at, n, at, at + n, v, error)) return false;
      expect(n);
      for (int k = 0; k < n; k++) {
        if (!without_gradient(v.i[k])) add(v.i[k], at + k, 0, A(1));
      }
    }
    return true;
  }
};

template <class A, class Sink>
inline bool scatter(const Job& job, const Sink& sink, int64_t begin, int64_t end, Error& error) {
  return Scatter<A, Sink>{job, sink, begin, end, {}, {}, {}}.run(job.call->outputs[job.column->output].rows, error);
}

// A column's entries in the dtype of its table; `sink` makes what takes them from a number of that dtype.
template <class Sink>
static bool scatter_column(const Call& call, int column, Sink sink, int64_t begin, int64_t end, Job& job, Error& error) {
  if (!resolve(call, call.plan.columns[column], job, error)) return false;
  if (job.table.dtype == kDouble) return scatter<double>(job, sink(double()), begin, end, error);
  if (job.table.dtype != kFloat) return job.fail("table gradients are float32 or float64", error);
  return scatter<float>(job, sink(float()), begin, end, error);
}

static bool run_scatter(const Call& call, int column, char* out, int64_t begin, int64_t end, Error& error) {
  Job job;
  const auto dense = [out](auto zero) { return Dense<decltype(zero)>{reinterpret_cast<decltype(zero)*>(out)}; };
  return scatter_column(call, column, dense, begin, end, job, error);
}

static bool run_list(const Call& call, int column, Entries& list, int64_t begin, int64_t end, Error& error) {
  Job job;
  const auto listed = [&list](auto zero) { return Listed<decltype(zero)>{list}; };
  if (!scatter_column(call, column, listed, begin, end, job, error)) return false;
  return list.n <= list.capacity || job.fail("more ids than its tensors hold", error);
}

// The rows of the output's gradient are read in the order of the ids: all over it.
constexpr int64_t kEntriesAhead = 8;

inline void prefetch_entry(const Entry& entry, int64_t dim) {
  const int64_t bytes = dim * element_size(entry.dtype);
  for (int64_t line = 0; line < bytes && line < 512; line += 64) __builtin_prefetch(entry.from + line);
}

// Entries in the order of their ids: a row of `values` and its number for each different id.
template <class A>
inline void sum_rows(const Entries& list, int64_t dim, int64_t* rows, A* values) {
  A *to = values, *next = values;
  for (int64_t k = 0; k < list.n; k++) {
    const Entry& entry = list.data[k];
    if (k + kEntriesAhead < list.n) prefetch_entry(list.data[k + kEntriesAhead], dim);
    if (k == 0 || entry.id != list.data[k - 1].id) {
      *rows++ = entry.id;
      to = next;
      next += dim;
      memset(to, 0, dim * sizeof(A));
    }
    add_row(to, entry.from, entry.dtype, dim, A(entry.scale));
  }
}

static void sum_entries(const Entries& list, int dtype, int64_t dim, int64_t* rows, char* values) {
  if (dtype == kDouble) sum_rows(list, dim, rows, reinterpret_cast<double*>(values));
  else sum_rows(list, dim, rows, reinterpret_cast<float*>(values));
}

}  // namespace fxopt::FXOPT_ISA
