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
  uint8_t counts[kTile];

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
      for (int k = 0; k < n; k++) {
        if (!without_gradient(v.i[k])) add(v.i[k], at + k, 0, A(1));
      }
    }
    return true;
  }
};

static bool run_scatter(const Call& call, int column, char* out, int64_t begin, int64_t end, Error& error) {
  Job job;
  if (!resolve(call, call.plan.columns[column], job, error)) return false;
  const int64_t rows = call.outputs[job.column->output].rows;
  if (job.table.dtype == kDouble) return Scatter<double>{job, reinterpret_cast<double*>(out), begin, end, {}, {}, {}}.run(rows, error);
  if (job.table.dtype != kFloat) return job.fail("table gradients are float32 or float64", error);
  return Scatter<float>{job, reinterpret_cast<float*>(out), begin, end, {}, {}, {}}.run(rows, error);
}

}  // namespace fxopt::FXOPT_ISA
