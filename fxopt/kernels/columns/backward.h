// Gradients of tables: rows of the output's gradient, scattered. One worker owns a range of a table's rows, so
// nothing is atomic and the order of additions is that of the ids.
#pragma once
#include "job.h"

namespace fxopt::FXOPT_ISA {

// Adds scale * grad to the row of each id of [from, to) that lies in [begin, end) of the table.
template <class A>
struct Scatter {
  const Job& job;
  A* out;  // [rows, dim], contiguous
  int64_t begin, end;
  Value v, w;

  static A value_at(const Value& x, int k) { return x.is_int() ? A(x.i[k]) : x.is_double() ? A(x.d[k]) : A(x.f[k]); }

  A grad_at(int64_t row, int64_t k) const {
    const char* grads = job.out + row * job.out_stride;
    switch (job.out_dtype) {
      case kFloat: return A(reinterpret_cast<const float*>(grads)[k]);
      case kDouble: return A(reinterpret_cast<const double*>(grads)[k]);
      case kHalf: return A(widen(reinterpret_cast<const Half*>(grads)[k]));
      default: return A(widen(reinterpret_cast<const BFloat16*>(grads)[k]));
    }
  }

  void add(int64_t id, int64_t row, int64_t lane, A scale) {
    A* to = out + id * job.dim;
    if (job.out_dtype == (sizeof(A) == 4 ? kFloat : kDouble)) {
      const A* from = reinterpret_cast<const A*>(job.out + row * job.out_stride) + lane * job.dim;
      for (int64_t d = 0; d < job.dim; d++) to[d] += scale * from[d];
    } else {
      for (int64_t d = 0; d < job.dim; d++) to[d] += scale * grad_at(row, lane * job.dim + d);
    }
  }

  // What a row of the result was divided by: the mean's count and the divisor.
  bool row_scale(int64_t row, int64_t from, int64_t to, A& scale, Error& error) {
    scale = 1;
    if (job.column->pool == kMean) {
      int64_t count = to - from;
      if (job.has(kHasPadding)) {
        for (int64_t at = from; at < to; at += kTile) {
          const int n = to - at < kTile ? int(to - at) : kTile;
          if (!eval_ids(job, at, n, row, row + 1, v, error)) return false;
          for (int k = 0; k < n; k++) count -= v.i[k] == job.column->padding;
        }
      }
      scale /= A(count ? count : 1);
    }
    if (job.divisor.data) {
      load(job.divisor, row, 1, w);
      scale /= value_at(w, 0);
    }
    return true;
  }

  bool run(int64_t rows, Error& error) {
    const bool lookup = job.column->pool == kNone, scaled = job.column->pool == kMean || job.divisor.data;
    if (!job.offsets && !scaled && !job.weights.data && job.ids.lanes == 1) return run_single(rows, error);
    for (int64_t row = 0; row < rows; row++) {
      int64_t from = row * job.ids.lanes, to = from + job.ids.lanes;
      if (job.offsets && !bag_range(job, row, from, to, error)) return false;
      A scale = 1;
      if (scaled && !row_scale(row, from, to, scale, error)) return false;
      for (int64_t at = from; at < to; at += kTile) {
        const int n = to - at < kTile ? int(to - at) : kTile;
        if (!eval_ids(job, at, n, row, row + 1, v, error)) return false;
        if (job.weights.data) load(job.weights, at, n, w);
        for (int k = 0; k < n; k++) {
          const int64_t id = v.i[k];
          if (id < begin || id >= end || (job.has(kHasPadding) && id == job.column->padding)) continue;
          add(id, row, lookup ? at - from + k : 0, job.weights.data ? scale * value_at(w, k) : scale);
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
      for (int k = 0; k < n; k++) {
        const int64_t id = v.i[k];
        if (id >= begin && id < end && !(job.has(kHasPadding) && id == job.column->padding)) add(id, at + k, 0, A(1));
      }
    }
    return true;
  }
};

static bool run_scatter(const Call& call, int column, char* out, int64_t begin, int64_t end, Error& error) {
  Job job;
  if (!resolve(call, call.plan.columns[column], job, error)) return false;
  const int64_t rows = call.outputs[job.column->output].rows;
  if (job.table.dtype == kDouble) return Scatter<double>{job, reinterpret_cast<double*>(out), begin, end, {}, {}}.run(rows, error);
  if (job.table.dtype != kFloat) return job.fail("table gradients are float32 or float64", error);
  return Scatter<float>{job, reinterpret_cast<float*>(out), begin, end, {}, {}}.run(rows, error);
}

}  // namespace fxopt::FXOPT_ISA
