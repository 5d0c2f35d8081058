// Masked lanes. What they give is nothing in almost every case, so a row is read only to see that, and its id is
// remembered: padding repeats one id, which then costs no row at all.
//
// Leaving a row out unread would be wrong for a row with an infinity or NaN: 0 * inf is NaN in eager. Reading it once
// keeps the answer exact for every table, and no state about tables outlives a work item.
#pragma once
#include "accumulate.h"

namespace fxopt::FXOPT_ISA {

template <class A>
struct LeftOut {
  enum How { kNothing, kTimesZero, kFill, kLower };
  static constexpr int kRemembered = 64;

  const Job& job;
  How how;
  A* row;  // [dim], scratch
  int64_t harmless[kRemembered];  // ids whose rows give nothing, at their low bits
  int64_t last = -1;              // the latest of them

  LeftOut(const Job& job, A* scratch) : job(job), how(how_of(job)), row(scratch) {
    for (int64_t& id : harmless) id = -1;
  }

  static How how_of(const Job& job) {
    if (!job.has(kIsMasked)) return kNothing;
    if (job.column->masked == kScaled) return kTimesZero;
    if (job.column->masked == kLowered) return kLower;
    return job.column->pool == kMax ? kFill : kNothing;
  }

  bool known(int64_t id) const { return harmless[id % kRemembered] == id; }
  void remember(int64_t id) { last = harmless[id % kRemembered] = id; }

  bool any_unknown(const int64_t* ids, int n) const {
    bool unknown = false;
    for (int k = 0; k < n; k++) unknown |= !known(ids[k]);
    return unknown;
  }

  // Adds the sum of 0 * row, which is in `row`.
  void join_zeros(const int64_t* ids, int n, A* acc) {
    A any = 0;
    for (int64_t d = 0; d < job.dim; d++) {
      any += row[d];
      acc[d] += row[d];
    }
    for (int k = 0; k < n && any == 0; k++) remember(ids[k]);
  }

  // The maximum with a constant, or with row - value for each; `started` tells whether acc holds anything yet.
  void max(const int64_t* ids, int n, A* acc, bool started) {
    const A value = A(job.extra->masked_value);
    if (how == kFill) {
      for (int64_t d = 0; n && d < job.dim; d++) row[d] = value;
      if (n) max_row(acc, row, job.dim, started);
      return;
    }
    // Below -value / 2 there is no maximum, where rows are within value / 8 of zero.
    bool far_above = started && value > 0 && value < A(INFINITY);
    for (int64_t d = 0; d < job.dim; d++) far_above &= acc[d] >= -value / 2;
    for (int k = 0; k < n; k++) {
      if ((far_above && known(ids[k])) || (k && ids[k] == ids[k - 1])) continue;
      widen_row(job.table, ids[k], row);
      bool small = true;
      for (int64_t d = 0; d < job.dim; d++) {
        small &= std::fabs(row[d]) <= value / 8;
        row[d] -= value;
      }
      if (small && value < A(INFINITY)) remember(ids[k]);
      if (far_above && small) continue;
      max_row(acc, row, job.dim, started);
      started = true;
    }
  }
};

}  // namespace fxopt::FXOPT_ISA
