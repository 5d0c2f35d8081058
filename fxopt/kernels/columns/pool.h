// Pooled lookups: sum, mean and max over bags, and every lookup that needs arithmetic on its rows.
#pragma once
#include "window.h"

namespace fxopt::FXOPT_ISA {

constexpr int kLevels = 48;  // of blocks that are added pairwise, about as torch.sum: its error grows with 16 + log2(n / 16)

template <class A>
struct Pooling {
  const Job& job;
  int64_t row0, row1;
  Window<A> window;
  A* acc;         // [dim]
  A* block;       // [kBlock, dim], for rows that must be converted first
  A* levels;      // [kLevels, dim], partial sums
  bool dense;     // a padded axis: sums may reorder, NaN wins a max
  bool fused;     // see Bag
  bool direct;    // rows are contiguous and of type A
  bool in_place;  // the output's row is the accumulator

  uint64_t n_blocks = 0;               // in `levels`
  const int64_t* raw = nullptr;        // all ids, where they need no evaluation
  const A* raw_weights = nullptr;
  int64_t raw_begin = 0, raw_end = 0;  // positions of `raw` that were checked
  const int64_t* readable = nullptr;   // where the ids end that may be prefetched
  int64_t kept = 0;                    // lanes of the last row that count

  Pooling(const Job& job, int64_t row0, int64_t row1, A* scratch, bool dense, bool fused, bool direct)
      : job(job), row0(row0), row1(row1), window(job, row0, row1, scratch), acc(scratch + job.dim), block(acc + job.dim),
        levels(block + kBlock * job.dim), dense(dense), fused(fused), direct(direct),
        in_place(job.out_dtype == (sizeof(A) == 8 ? kDouble : kFloat) && !job.has(kAdd) && job.column->pool != kNone) {}

  // Ids that need no evaluation are read where they lie.
  void find_raw(int64_t first) {
    const View &view = job.ids, &w = job.weights;
    const bool plain = job.program.size == 0 && view.dtype == kInt64 && view.n[2] == view.rows * view.lanes &&
                       view.stride[2] == 8 && !job.has(kWrapNegative) && !job.has(kHasPadding) && !job.has(kIsMasked) && job.column->pool != kNone;
    const bool plain_weights = !w.data || (w.dtype == (sizeof(A) == 8 ? kDouble : kFloat) && w.stride[2] == sizeof(A) && w.n[2] == view.n[2]);
    if (!plain || !plain_weights) return;
    raw = reinterpret_cast<const int64_t*>(view.data);
    raw_weights = reinterpret_cast<const A*>(w.data);
    raw_begin = raw_end = first;
  }

  // Checks raw ids up to `to`, and those that are prefetched meanwhile.
  bool check_raw(int64_t to, int64_t last, Error& error) {
    const int64_t begin = raw_end, end = last - to < kFarAhead ? last : to + kFarAhead;
    uint64_t bad = 0;
    for (int64_t k = begin; k < end; k++) bad |= uint64_t(uint64_t(raw[k]) >= uint64_t(job.table.rows));
    if (bad) {
      int64_t at = begin;
      while (uint64_t(raw[at]) < uint64_t(job.table.rows)) at++;
      return bad_id(job, at, raw[at], row0, row1, error);
    }
    raw_end = end > begin ? end : begin;
    if (begin == raw_begin) prefetch_rows(job.table, raw + begin, raw_end - begin);
    readable = raw + raw_end;
    return true;
  }

  // Leaves padding out, in place: positions of a window are used once.
  int drop_padding(int64_t* bag, A* w, int n) {
    int real = 0;
    for (int k = 0; k < n; k++) {
      if (bag[k] == job.column->padding) continue;
      bag[real] = bag[k];
      w[real++] = w[k];
    }
    return real;
  }

  // Adds rows to `to`, strictly in order.
  void sum_in_order(const int64_t* bag, const A* w, int64_t n, A* to) {
    if (direct) return add_rows<A>({job.table.data, job.table.row_stride, bag, w, fused, n, job.table.prefetch ? readable - bag : 0}, job.dim, to);
    static const int64_t kIdentity[kBlock] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t extra = job.table.dtype == kUInt8 ? sizeof(Quantization) : 0;
    const int64_t prefetch = job.table.prefetch ? job.dim * element_size(job.table.dtype) + extra : 0;
    for (int64_t at = 0; at < n; at += kBlock) {
      const int64_t m = n - at < kBlock ? n - at : kBlock;
      for (int k = 0; k < m; k++) {
        for (int64_t line = 0; line < prefetch; line += 64)
          __builtin_prefetch(job.table.data + id_ahead(bag, at + k + kAhead, readable - bag) * job.table.row_stride + line);
        widen_row(job.table, bag[at + k], block + k * job.dim);
      }
      const char* rows = reinterpret_cast<char*>(block);
      add_rows<A>({rows, job.dim * int64_t(sizeof(A)), kIdentity, w ? w + at : w, fused, m, 0}, job.dim, to);
    }
  }

  void clear(A* to) {
    for (int64_t d = 0; d < job.dim; d++) to[d] = 0;
  }

  void add_to(A* to, const A* from) {
    for (int64_t d = 0; d < job.dim; d++) to[d] += from[d];
  }

  void sum(const int64_t* bag, const A* w, int64_t n) {
    if (!job.weights.data) w = nullptr;
    if (!dense || job.ids.lanes <= kBlock) return sum_in_order(bag, w, n, acc);
    for (int64_t at = 0; at < n; at += kBlock) {
      int level = 0;
      A* part = levels;  // level l holds the sum of 2^l blocks where bit l of n_blocks is set
      for (; n_blocks >> level & 1; level++) part += job.dim;
      clear(part);
      sum_in_order(bag + at, w ? w + at : w, n - at < kBlock ? n - at : kBlock, part);
      for (int l = level - 1; l >= 0; l--) add_to(part, levels + l * job.dim);
      n_blocks++;
    }
  }

  void join_blocks() {
    for (int level = 0; n_blocks >> level; level++)
      if (n_blocks >> level & 1) add_to(acc, levels + level * job.dim);
    n_blocks = 0;
  }

  void max(const int64_t* bag, int64_t n, bool first) {
    for (int64_t k = 0; k < n; k++, first = false) {
      A* row = first ? acc : block;
      widen_row(job.table, bag[k], row);
      if (first) continue;
      if (dense) max_row(acc, row, job.dim, true);
      else for (int64_t d = 0; d < job.dim; d++) acc[d] = row[d] > acc[d] ? row[d] : acc[d];
    }
  }

  // Positions [from, to) into acc; `last` is where evaluation may run ahead to. Returns how many ids counted.
  bool reduce(int64_t from, int64_t to, int64_t last, int64_t& count, Error& error) {
    clear(acc);
    count = kept = 0;
    if (raw) {
      if (!check_raw(to, last, error)) return false;
      count = to - from;
      if (job.column->pool == kMax) max(raw + from, count, true);
      else sum(raw + from, raw_weights + from, count);
      from = to;
    }
    while (from < to) {
      const bool outside = from < window.begin || from >= window.end, more = window.end < last;
      if ((outside || (more && window.end - from <= kFarAhead)) && !window.evaluate(from, last, error)) return false;
      const int at = int(from - window.begin);
      const int64_t ready = window.end < last ? window.end - kFarAhead : window.end;  // the rest serves prefetch until the window slides
      int n = int((to < ready ? to : ready) - from);
      from += n;
      readable = window.end_of_ids();
      if (window.selective) {
        reduce_selected(window.upto[at], window.upto[at + n], n, count);
        continue;
      }
      int64_t* ids = window.ids + at;
      if (job.has(kHasPadding) && job.column->pool != kNone) n = drop_padding(ids, window.weights + at, n);
      if (job.column->pool == kNone) widen_row(job.table, *ids, acc);
      else if (job.column->pool == kMax) max(ids, n, count == 0);
      else sum(ids, window.weights + at, n);
      count += n;
    }
    join_blocks();
    return true;
  }

  void reduce_selected(Upto from, Upto to, int lanes, int64_t& count) {
    const int64_t* rest = window.others + from.others;
    const int n = to.ids - from.ids, n_rest = to.others - from.others;
    if (job.column->pool == kMax) {
      max(window.ids + from.ids, n, count == 0);
      if (n_rest) window.left_out.max(rest, n_rest, acc, count + n > 0);
    } else {
      sum(window.ids + from.ids, nullptr, n);
      if (window.left_out.any_unknown(rest, n_rest)) add_left_out(rest, n_rest);
    }
    kept += n;
    count += lanes;
  }

  void add_left_out(const int64_t* rest, int n) {
    static const A kZeros[kTile] = {};
    A* zeros = window.left_out.row;
    clear(zeros);
    readable = window.end_of_others();
    sum_in_order(rest, kZeros, n, zeros);
    window.left_out.join_zeros(rest, n, acc);
  }

  template <class O>
  void write(int64_t row, int64_t lane, int64_t count, A by) {
    O* out = reinterpret_cast<O*>(job.out + row * job.out_stride) + lane * job.dim;
    auto put = [](A x) { O y; narrow(x, y); return y; };
    const bool mean = job.column->pool == kMean;
    if (mean && count == 0) {
      for (int64_t d = 0; d < job.dim; d++) acc[d] = job.has(kEmptyNan) ? A(NAN) : A(0);
    } else if (mean) {  // torch's bags round their sums first, its mean over a dim does not: halves would overflow
      const bool once = dense && job.has(kEmptyNan);
      for (int64_t d = 0; d < job.dim; d++) acc[d] = (once ? acc[d] : A(widen(put(acc[d])))) / A(count);
    }
    if (job.divides()) {
      for (int64_t d = 0; d < job.dim; d++) acc[d] = A(widen(put(acc[d]))) / by;
    }
    if (job.has(kAdd)) for (int64_t d = 0; d < job.dim; d++) out[d] = put(A(widen(out[d])) + A(widen(put(acc[d]))));
    else if (!in_place) for (int64_t d = 0; d < job.dim; d++) out[d] = put(acc[d]);
  }

  bool write(int64_t row, int64_t lane, int64_t count, Error& error) {
    A by = 1;
    if (job.divides() && !divisor_of(job, row, kept, by, error)) return false;
    switch (job.out_dtype) {
      case kFloat: write<float>(row, lane, count, by); break;
      case kDouble: write<double>(row, lane, count, by); break;
      case kHalf: write<Half>(row, lane, count, by); break;
      default: write<BFloat16>(row, lane, count, by);
    }
    return true;
  }

  bool run(Error& error) {
    int64_t first = 0, last = row1 * job.ids.lanes, count = 0;
    if (job.offsets) {
      int64_t unused;
      if (!bag_range(job, row0, first, unused, error) || !bag_range(job, row1 - 1, unused, last, error)) return false;
    } else {
      first = row0 * job.ids.lanes;
    }
    find_raw(first);
    for (int64_t row = row0; row < row1; row++) {
      int64_t from = row * job.ids.lanes, to = from + job.ids.lanes;
      if (job.offsets && !bag_range(job, row, from, to, error)) return false;
      if (job.column->pool == kNone) {
        for (int64_t lane = 0; lane < job.lanes; lane++) {
          if (!reduce(from + lane, from + lane + 1, last, count, error) || !write(row, lane, count, error)) return false;
        }
        continue;
      }
      if (last < to) last = to;
      if (in_place) acc = reinterpret_cast<A*>(job.out + row * job.out_stride);
      if (!reduce(from, to, last, count, error) || !write(row, 0, count, error)) return false;
    }
    return true;
  }
};

template <class A>
bool pool(const Job& job, int64_t row0, int64_t row1, Error& error) {
  A* scratch = reinterpret_cast<A*>(job.call->scratch(job.dim * (2 + kBlock + kLevels) * sizeof(A)));
  const bool dense = !job.offsets && job.column->pool != kNone;
  // As F.embedding_bag: FBGEMM, which fuses, takes contiguous rows without padding.
  const bool in_order = job.table.column_stride == element_size(job.table.dtype);
  const bool floats = job.table.dtype == kFloat || job.table.dtype == kUInt8;
  const bool fused = floats && in_order && job.offsets && !job.has(kHasPadding);
  const bool direct = in_order && job.table.dtype == (sizeof(A) == 8 ? kDouble : kFloat);
  return Pooling<A>(job, row0, row1, scratch, dense, fused, direct).run(error);
}

inline bool pool(const Job& job, int64_t row0, int64_t row1, Error& error) {
  const bool wide = job.table.dtype == kDouble || job.out_dtype == kDouble || (job.weights.data && job.weights.dtype == kDouble);
  return wide ? pool<double>(job, row0, row1, error) : pool<float>(job, row0, row1, error);
}

}  // namespace fxopt::FXOPT_ISA
