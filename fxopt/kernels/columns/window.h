// The ids of a column, evaluated a tile at a time and some ahead of the rows that are being added, for prefetch.
#pragma once
#include "masked.h"

namespace fxopt::FXOPT_ISA {

// The rows that nothing before them fetches ahead. Inlined, or GCC takes it for a function without effect and drops its
// calls: 300,000 x 64 rows, 1 to 16 rows of 8 to 50 ids: 1.2-1.4x.
[[gnu::always_inline]] inline void prefetch_rows(const Table& table, const int64_t* ids, int64_t n) {
  if (!table.prefetch) return;
  for (int64_t k = 0; k < n && k < kFarAhead; k++)
    for (int64_t line = 0; line < table.row_stride && line < 512; line += 64)
      __builtin_prefetch(table.data + ids[k] * table.row_stride + line);
}

// Where some lanes may not count, `ids` are those that do, and `others` those that give something all the same.
// upto[p]: how many of each lie before the window's position p.
struct Upto { uint16_t ids, others; };

template <class A>
struct Window {
  const Job& job;
  int64_t row0, row1;
  int64_t begin = 0, end = 0;  // evaluated: the ids and weights of these positions
  bool selective;              // some lanes may not count
  LeftOut<A> left_out;
  Value v;
  int64_t ids[kTile], others[kTile];
  alignas(64) A weights[kTile];
  Upto upto[kTile + 1];

  Window(const Job& job, int64_t row0, int64_t row1, A* scratch)
      : job(job), row0(row0), row1(row1), selective(job.has(kIsMasked)), left_out(job, scratch) {}

  const int64_t* end_of_ids() const { return ids + (selective ? upto[end - begin].ids : end - begin); }
  const int64_t* end_of_others() const { return others + upto[end - begin].others; }

  // Slides the window to `position`: what was evaluated ahead stays, the rest is filled up to `last`.
  bool evaluate(int64_t position, int64_t last, Error& error) {
    const int kept = position >= begin && position < end ? int(end - position) : 0;
    const int n = last - position < kTile ? int(last - position) - kept : kTile - kept;
    if (selective) return select(position, kept, n, error);
    memmove(ids, ids + (position - begin) * (kept > 0), kept * sizeof(int64_t));
    memmove(weights, weights + (position - begin) * (kept > 0), kept * sizeof(A));
    if (!eval_ids(job, position + kept, n, row0, row1, v, error)) return false;
    memcpy(ids + kept, v.i, n * sizeof(int64_t));
    if (!kept) prefetch_rows(job.table, ids, n);
    if (job.weights.data) {
      load(job.weights, position + kept, n, v);
      for (int k = 0; k < n; k++) weights[kept + k] = v.is_int() ? A(v.i[k]) : v.is_double() ? A(v.d[k]) : A(v.f[k]);
    }
    begin = position;
    end = position + kept + n;
    return true;
  }

  // The same where some lanes may not count. Without branches: masks may look random.
  bool select(int64_t position, int stays, int n, Error& error) {
    uint8_t counts[kTile];
    slide(stays ? int(position - begin) : 0, stays);
    if (!eval_masked(job, position + stays, n, row0, row1, v, counts, error)) return false;
    const int64_t harmless = left_out.how == LeftOut<A>::kTimesZero ? left_out.last : -1;
    const bool gives = left_out.how != LeftOut<A>::kNothing;
    Upto to = upto[stays];
    for (int k = 0; k < n; k++) {
      ids[to.ids] = others[to.others] = v.i[k];
      to.ids += counts[k];
      to.others += gives & !counts[k] & (v.i[k] != harmless);
      upto[stays + k + 1] = to;
    }
    if (!stays) prefetch_rows(job.table, ids, to.ids);
    begin = position;
    end = position + stays + n;
    return true;
  }

  // Moves the window's positions [from, from + n) to its begin.
  void slide(int from, int n) {
    const Upto first = n ? upto[from] : Upto{0, 0};
    upto[0] = {0, 0};
    for (int p = 1; p <= n; p++) upto[p] = {uint16_t(upto[from + p].ids - first.ids), uint16_t(upto[from + p].others - first.others)};
    memmove(ids, ids + first.ids, upto[n].ids * sizeof(int64_t));
    memmove(others, others + first.others, upto[n].others * sizeof(int64_t));
  }
};

}  // namespace fxopt::FXOPT_ISA
