// Lookups and copies without arithmetic: table rows, or plain values, straight into the output.
#pragma once
#include "accumulate.h"

namespace fxopt::FXOPT_ISA {

[[gnu::always_inline]] inline void fetch_row(const char* row, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line);
}

template <int BYTES>
inline void copy_rows(const Table& table, const int64_t* ids, int n, char* out, int64_t out_stride, int64_t) {
  if (table.prefetch) {
    for (int k = 0; k < n; k++) __builtin_prefetch(table.data + ids[k] * table.row_stride);
  }
  for (int k = 0; k < n; k++) memcpy(out + k * out_stride, table.data + ids[k] * table.row_stride, BYTES);
}

// use(k, row) for the rows of all ids, which are fetched ahead.
template <class F>
[[gnu::always_inline]] inline void each_row(const Table& table, const int64_t* ids, int n, int64_t bytes, F use) {
  const int64_t fetched = table.prefetch ? bytes : 0;
  const auto row = [&](int k) { return table.data + ids[k] * table.row_stride; };
  for (int k = 0; k < n && k < kAhead; k++) fetch_row(row(k), fetched);
  for (int k = 0; k < n; k++) {
    if (k + kAhead < n) fetch_row(row(k + kAhead), fetched);
    use(k, row(k));
  }
}

inline void copy_rows_any(const Table& table, const int64_t* ids, int n, char* out, int64_t out_stride, int64_t bytes) {
  each_row(table, ids, n, bytes, [=](int k, const char* row) { memcpy(out + k * out_stride, row, bytes); });
}

inline void copy_rows(const Table& table, const int64_t* ids, int n, char* out, int64_t out_stride, int64_t bytes) {
  switch (bytes) {
    case 4: return copy_rows<4>(table, ids, n, out, out_stride, bytes);
    case 16: return copy_rows<16>(table, ids, n, out, out_stride, bytes);
    case 32: return copy_rows<32>(table, ids, n, out, out_stride, bytes);
    case 64: return copy_rows<64>(table, ids, n, out, out_stride, bytes);
    case 128: return copy_rows_any(table, ids, n, out, out_stride, 128);
    case 256: return copy_rows_any(table, ids, n, out, out_stride, 256);
    default: return copy_rows_any(table, ids, n, out, out_stride, bytes);
  }
}

// Bags of one row: what adding it to zeros gives, which is the row but for the sign of a zero.
template <class T>
inline void sum_one(const T* row, T* to, int64_t dim) {
  for (int64_t d = 0; d < dim; d++) to[d] = row[d] + T(0);
}

inline void sum_one(int dtype, const char* row, char* to, int64_t bytes) {
  if (dtype == kDouble) return sum_one(reinterpret_cast<const double*>(row), reinterpret_cast<double*>(to), bytes / 8);
  sum_one(reinterpret_cast<const float*>(row), reinterpret_cast<float*>(to), bytes / 4);
}

inline void sum_ones(const Table& table, const int64_t* ids, int n, char* out, int64_t out_stride, int64_t bytes) {
  each_row(table, ids, n, bytes, [&](int k, const char* row) { sum_one(table.dtype, row, out + k * out_stride, bytes); });
}

inline void copy_now(Later& later) {
  const int64_t first = 0;
  for (int k = 0; k < later.n; k++) {
    const Later::Move& move = later.moves[k];
    if (move.sum_of < 0) copy_rows(Table{move.from}, &first, 1, move.to, 0, move.bytes);
    else sum_one(move.sum_of, move.from, move.to, move.bytes);
  }
  later.n = 0;
}

inline bool adds_zero(const Job& job) { return job.column->pool == kSum || job.column->pool == kMean; }

// Whether the rows wait for those of the next columns.
inline bool copy_later(const Job& job, const int64_t* ids, int n, char* out, int64_t out_stride, int64_t bytes) {
  if (!job.later || !job.table.prefetch || n > Later::kMost - job.later->n) return false;
  for (int k = 0; k < n; k++) {
    const char* from = job.table.data + ids[k] * job.table.row_stride;
    fetch_row(from, bytes);
    job.later->moves[job.later->n++] = {from, out + k * out_stride, bytes, adds_zero(job) ? job.table.dtype : -1};
  }
  return true;
}

// Rows in fewer bits, as floats.
inline void widen_rows(const Table& table, const int64_t* ids, int n, char* out, int64_t out_stride) {
  const int64_t bytes = table.prefetch ? table.row_stride : 0;
  for (int k = 0; k < n; k++) {
    if (k + kAhead < n) fetch_row(table.data + ids[k + kAhead] * table.row_stride, bytes);
    widen_row(table, ids[k], reinterpret_cast<float*>(out + k * out_stride));
  }
}

template <class T>
inline void add_row(const T* row, T* to, int64_t dim) {
  int64_t d = 0;
  if constexpr (__is_same(T, float) || __is_same(T, double)) {
    using V = typename Vector<T, FXOPT_VECTOR_BYTES>::type;
    constexpr int64_t kLanes = sizeof(V) / sizeof(T);
    for (; d + kLanes <= dim; d += kLanes) {
      const V sum = load_as<V>(to + d) + load_as<V>(row + d);
      memcpy(to + d, &sum, sizeof sum);
    }
  }
  for (; d < dim; d++) narrow(widen(to[d]) + widen(row[d]), to[d]);
}

// Rows onto what the output holds, as eager adds one lookup to another.
template <class T>
inline void add_rows_to(const Table& table, const int64_t* ids, int n, char* out, int64_t out_stride) {
  const int64_t fetched = table.prefetch ? table.dim * sizeof(T) : 0;
  for (int k = 0; k < n; k++) {
    if (k + kAhead < n) fetch_row(table.data + ids[k + kAhead] * table.row_stride, fetched);
    add_row(reinterpret_cast<const T*>(table.data + ids[k] * table.row_stride), reinterpret_cast<T*>(out + k * out_stride), table.dim);
  }
}

inline void add_rows_to(const Job& job, const int64_t* ids, int n, char* out, int64_t out_stride) {
  switch (job.out_dtype) {
    case kFloat: return add_rows_to<float>(job.table, ids, n, out, out_stride);
    case kDouble: return add_rows_to<double>(job.table, ids, n, out, out_stride);
    case kHalf: return add_rows_to<Half>(job.table, ids, n, out, out_stride);
    default: return add_rows_to<BFloat16>(job.table, ids, n, out, out_stride);
  }
}

inline void move_rows(const Job& job, const int64_t* ids, int n, char* out, int64_t out_stride, int64_t bytes) {
  if (job.has(kAdd)) return add_rows_to(job, ids, n, out, out_stride);
  if (job.table.dtype != job.out_dtype) return widen_rows(job.table, ids, n, out, out_stride);
  if (copy_later(job, ids, n, out, out_stride, bytes)) return;
  if (adds_zero(job)) sum_ones(job.table, ids, n, out, out_stride, bytes);
  else copy_rows(job.table, ids, n, out, out_stride, bytes);
}

// Pooling of one id a row. 100 x nn.EmbeddingBag(x[:, i : i + 1]), 10,000 x 16 each, and an MLP: 0.14 ms at 64 rows and
// 0.47 at 256, where Pooling takes 0.28 and 1.09.
inline bool is_bag_of_one(const Job& job) {
  const bool changed = job.weights.data || job.divides() || job.has(kHasPadding) || job.has(kIsMasked) || job.has(kAdd);
  return !job.offsets && job.ids.lanes == 1 && !changed && job.table.dtype == job.out_dtype &&
         (job.out_dtype == kFloat || job.out_dtype == kDouble) &&
         (job.table.column_stride == element_size(job.table.dtype) || job.dim == 1);
}

// A lookup without pooling whose rows need no arithmetic, only become floats, or are added to another lookup's: 64 x 50
// rows of 32 floats and as many added to them take 33 us, and 90 where Pooling adds them.
inline bool is_gather(const Job& job) {
  if (job.column->pool != kNone) return is_bag_of_one(job);
  const bool same = job.table.dtype == job.out_dtype, widens = job.out_dtype == kFloat && job.table.dtype != kDouble;
  return (same || (widens && !job.has(kAdd))) && !job.divides() &&
         (job.table.column_stride == element_size(job.table.dtype) || job.dim == 1);
}

inline bool gather(const Job& job, int64_t row0, int64_t row1, Error& error) {
  const int64_t bytes = job.dim * element_size(job.out_dtype), lanes = job.lanes;
  Value v;
  for (int64_t position = row0 * lanes; position < row1 * lanes;) {
    const int n = row1 * lanes - position < kTile ? int(row1 * lanes - position) : kTile;
    if (!eval_ids(job, position, n, row0, row1, v, error)) return false;
    if (lanes == 1) {
      move_rows(job, v.i, n, job.out + position * job.out_stride, job.out_stride, bytes);
    } else {
      int64_t row = position / lanes, lane = position % lanes;
      for (int k = 0; k < n; row++, lane = 0) {
        const int run = lanes - lane < n - k ? int(lanes - lane) : n - k;
        move_rows(job, v.i + k, run, job.out + row * job.out_stride + lane * bytes, bytes, bytes);
        k += run;
      }
    }
    position += n;
  }
  return true;
}

// A copy of values that needs neither a program nor a conversion.
inline bool is_move(const Job& job) {
  return job.program.size == 0 && job.ids.dtype == job.out_dtype && !job.has(kAdd) && !job.divides();
}

inline void move_values(const Job& job, int64_t row0, int64_t row1) {
  const View& view = job.ids;
  const int size = element_size(job.out_dtype);
  const int64_t lanes = job.lanes;
  for (int64_t row = row0; row < row1; row++) {
    char* out = job.out + row * job.out_stride;
    for (int64_t lane = 0; lane < lanes;) {
      const int64_t position = row * lanes + lane, i = position % view.n[2], j = position / view.n[2];
      const int64_t left = view.n[2] - i, run = left < lanes - lane ? left : lanes - lane;
      const char* from = view.data + (j / view.n[1]) * view.stride[0] + (j % view.n[1]) * view.stride[1] + i * view.stride[2];
      if (view.stride[2] == size) {
        memcpy(out, from, run * size);
      } else {
        for (int64_t k = 0; k < run; k++) memcpy(out + k * size, from + k * view.stride[2], size);
      }
      out += run * size;
      lane += run;
    }
  }
}

}  // namespace fxopt::FXOPT_ISA
