// Plain bags: sums and means of contiguous rows of floats, in half of their bits or a quarter. All bags of a work item
// are one loop over ids, in which an id is checked when its row is fetched ahead. 1M x 64, 50 ids a bag: 7.0 ns an id;
// checked bag by bag 7.5, as Pooling does it 8.5, F.embedding_bag 9.2. Ids that a program makes, or that do not lie one
// behind the other, are made first.
#pragma once
#include "accumulate.h"

namespace fxopt::FXOPT_ISA {

constexpr int kMostVectors = 8;  // sums that stay in registers

constexpr int kBeside = 8;  // bags of single floats
constexpr int64_t kMostEvaluated = 1 << 13;  // ids made at a time, where one bag does not hold more: 64 KB
constexpr int kMostLevels = 7;               // of blocks that are added pairwise
constexpr int64_t kMostLanes = kBlock << (kMostLevels - 1);  // of a padded axis

inline bool reads_ids(const Job& job) {
  const View& ids = job.ids;
  const int64_t size = ids.dtype == kInt64 ? 8 : ids.dtype == kInt32 ? 4 : 0;
  return size && (ids.stride[2] == size || ids.rows * ids.lanes <= 1) && ids.n[2] == ids.rows * ids.lanes;
}

inline bool is_plain_bags(const Job& job) {
  const int64_t vectors = (job.dim + kLanes - 1) / kLanes;
  const bool whole = job.dim == 8 || (job.dim % kLanes == 0 && !(vectors & (vectors - 1)));
  const bool in_registers = vectors > 0 && vectors <= kMostVectors && (whole || job.table.dtype == kFloat);
  return (job.offsets || job.ids.lanes <= kMostLanes) && (job.column->pool == kSum || job.column->pool == kMean) &&
         !job.weights.data && !job.divides() && !job.has(kWrapNegative) && !job.has(kHasPadding) && !job.has(kIsMasked) &&
         !job.has(kAdd) && job.out_dtype == kFloat && in_registers &&
         (job.table.dtype == kFloat || job.table.dtype == kBFloat16 || job.table.dtype == kUInt8) &&
         job.table.column_stride == element_size(job.table.dtype);
}

// The ids of a row of the result: [from, to).
inline bool ids_of_row(const Job& job, int64_t row, int64_t& from, int64_t& to, Error& error) {
  if (job.offsets) return bag_range(job, row, from, to, error);
  from = row * job.ids.lanes;
  to = from + job.ids.lanes;
  return true;
}

// Blocks of a padded axis, added in the order in which Pooling adds them.
template <class V, int N>
struct Pairwise {
  V levels[kMostLevels][N];  // level l holds the sum of 2^l blocks where bit l of n is set
  uint64_t n = 0;

  void take(V* block) {
    const int level = __builtin_ctzll(~n);
    for (int l = level - 1; l >= 0; l--)
      for (int i = 0; i < N; i++) block[i] += levels[l][i];
    for (int i = 0; i < N; i++) {
      levels[level][i] = block[i];
      block[i] = V{};
    }
    n++;
  }

  void join(V* sum) const {
    for (int level = 0; n >> level; level++)
      for (int i = 0; n >> level & 1 && i < N; i++) sum[i] += levels[level][i];
  }
};

struct FloatRow {
  static constexpr int kBytes = 4, kExtra = 0;  // of an element; of a row beside them
  const char* data;

  FloatRow(const char* data, int64_t) : data(data) {}
  template <class V>
  V at(int i) const { return load_as<V>(data + i * sizeof(V)); }
  Floats first(int i, int n) const { return load(reinterpret_cast<const float*>(data) + i * kLanes, n); }
};

struct BFloat16Row {
  static constexpr int kBytes = 2, kExtra = 0;
  const char* data;

  BFloat16Row(const char* data, int64_t) : data(data) {}
  template <class V>
  V at(int i) const { return load_bfloat16<V>(data + i * (sizeof(V) / 2)); }
};

struct CodesRow {
  static constexpr int kBytes = 1, kExtra = sizeof(Quantization);
  const char* data;
  Quantization by;

  CodesRow(const char* data, int64_t dim) : data(data), by(quantization_of(data, dim)) {}
  template <class V>
  V at(int i) const { return load_codes<V>(data + i * (sizeof(V) / sizeof(float))) * by.scale + by.offset; }
};

template <class Row, class Id>
struct PlainBags {
  const Job& job;
  const Id* ids;
  int64_t row0, row1, first, last;  // rows, and the ids of all their bags

  bool bad(int64_t k) const { return uint64_t(ids[k]) >= uint64_t(job.table.rows); }
  bool fail(int64_t k, Error& error) const { return bad_id(job, k, ids[k], row0, row1, error); }
  const char* row_of(int64_t k) const { return job.table.data + int64_t(ids[k]) * job.table.row_stride; }
  int64_t ahead(int64_t k) const { return k < last ? k : last - 1; }

  bool start(Error& error) const {
    for (int64_t k = first; k < last && k < first + kFarAhead; k++) {
      if (bad(k)) return fail(k, error);
      for (int64_t line = 0; job.table.prefetch && line < job.dim * Row::kBytes + Row::kExtra; line += 64) __builtin_prefetch(row_of(k) + line);
    }
    return true;
  }

  // `sum` is one vector of BYTES for each I, and with TAIL one more, for less than a vector.
  template <int BYTES, bool TAIL, int... I>
  bool run(std::integer_sequence<int, I...>, Error& error) const {
    using V = typename Vector<float, BYTES>::type;
    constexpr int N = sizeof...(I), kStep = BYTES / 4 * Row::kBytes, kLine = kStep < 64 ? 64 / kStep : 1;  // vectors in a cache line
    const bool mean = job.column->pool == kMean, prefetch = job.table.prefetch;
    [[maybe_unused]] const int tail = int(job.dim) - N * BYTES / 4;
    if (!start(error)) return false;
    for (int64_t row = row0; row < row1; row++) {
      int64_t from, to;
      if (!ids_of_row(job, row, from, to, error)) return false;
      if (to > last) to = last;  // then a later bag shrinks, which fails the call
      V sum[N + TAIL] = {};
      Pairwise<V, N + TAIL> blocks;
      for (int64_t begin = from, end; begin < to; begin = end) {
        end = job.offsets || to - begin <= kBlock ? to : begin + kBlock;
        for (int64_t k = begin; k < end; k++) {
          const int64_t next = ahead(k + kFarAhead);
          if (__builtin_expect(bad(next), false)) return fail(next, error);
          if (prefetch) {
            const char *far = row_of(next), *near = row_of(ahead(k + kAhead));
            ((I % kLine == 0 ? __builtin_prefetch((I ? near : far) + I * kStep) : void()), ...);
            if (N == 0) __builtin_prefetch(far);
            if (TAIL) __builtin_prefetch(near + job.dim * 4 - 1);
            if (Row::kExtra) __builtin_prefetch(near + N * kStep);
          }
          const Row values(row_of(k), job.dim);
          ((sum[I] += values.template at<V>(I)), ...);
          if constexpr (TAIL) sum[N] += values.first(N, tail);
        }
        if (end < to || begin > from) blocks.take(sum);
      }
      if (blocks.n) blocks.join(sum);
      if (mean) {
        const V n = V{} + (from == to && !job.has(kEmptyNan) ? 1 : float(to - from));
        ((sum[I] /= n), ...);
        if (TAIL) sum[N] /= n;
      }
      char* out = job.out + row * job.out_stride;
      (memcpy(out + I * BYTES, &sum[I], BYTES), ...);
      if constexpr (TAIL) {
        const V rest = sum[N];  // or sums leave their registers for its address: 4096 x 26 rows of 4 floats 125 us, 178 so
        memcpy(out + N * BYTES, &rest, tail * sizeof(float));
      }
    }
    return true;
  }

  template <int BYTES, int N, bool TAIL = false>
  bool run(Error& error) const { return run<BYTES, TAIL>(std::make_integer_sequence<int, N>(), error); }

  // With as many whole vectors as a row has, which is one of N.
  template <bool TAIL, int... N>
  bool of(std::integer_sequence<int, N...>, Error& error) const {
    bool good = true;
    ((job.dim / kLanes == N ? void(good = run<FXOPT_VECTOR_BYTES, N, TAIL>(error)) : void()), ...);
    return good;
  }

  // Padded bags of rows of one float, several beside each other, because additions of one bag wait for one another: 4096
  // bags of 26 of them take 60 us, and 159 as vectors of which one lane counts.
  bool add_ones(Error& error) const {
    const int64_t lanes = job.ids.lanes, most = row1 - row0;
    const float by = job.column->pool == kMean ? float(lanes) : 1.0f;
    for (int64_t done = 0; done < most; done += kBeside) {
      int64_t bag[kBeside];
      for (int b = 0; b < kBeside; b++) bag[b] = (row0 + (done + b < most ? done + b : done)) * lanes;
      float sum[kBeside] = {};
      Pairwise<float, kBeside> blocks;
      for (int64_t begin = 0, end; begin < lanes; begin = end) {
        end = lanes - begin <= kBlock ? lanes : begin + kBlock;
        for (int64_t l = begin; l < end; l++) {
          for (int b = 0; b < kBeside; b++) {
            if (__builtin_expect(bad(bag[b] + l), false)) return fail_first(error);
            sum[b] += *reinterpret_cast<const float*>(row_of(bag[b] + l));
          }
        }
        if (end < lanes || begin > 0) blocks.take(sum);
      }
      if (blocks.n) blocks.join(sum);
      for (int b = 0; b < kBeside && done + b < most; b++) {
        const float x = sum[b] / by;
        memcpy(job.out + (row0 + done + b) * job.out_stride, &x, sizeof x);
      }
    }
    return true;
  }

  bool fail_first(Error& error) const {
    int64_t k = first;
    while (!bad(k)) k++;
    return fail(k, error);
  }

  bool run(Error& error) const {
    if constexpr (__is_same(Row, FloatRow)) {
      if (job.dim == 1 && !job.offsets && job.ids.lanes > 0) return add_ones(error);
    }
    if (job.dim == 8 && kLanes > 8) return run<FXOPT_VECTOR_BYTES / 2, 1>(error);
    if constexpr (__is_same(Row, FloatRow)) {
      if (job.dim % kLanes) return of<true>(std::make_integer_sequence<int, kMostVectors>(), error);
      return of<false>(std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 7, kMostVectors>(), error);
    }
    return of<false>(std::integer_sequence<int, 1, 2, 4, kMostVectors>(), error);
  }
};

template <class Row, class Id>
bool sum_plain_bags(const Job& job, int64_t row0, int64_t row1, Error& error) {
  int64_t first, last, unused;
  if (!ids_of_row(job, row0, first, unused, error) || !ids_of_row(job, row1 - 1, unused, last, error)) return false;
  return PlainBags<Row, Id>{job, reinterpret_cast<const Id*>(job.ids.data), row0, row1, first, last}.run(error);
}

// The ids of positions [first, last), made by the column's program.
inline const int64_t* evaluated(const Job& job, int64_t first, int64_t last, int64_t row0, int64_t row1, Error& error) {
  int64_t* ids = reinterpret_cast<int64_t*>(job.call->scratch((last - first + 1) * sizeof(int64_t)));
  Value v;
  for (int64_t at = first; at < last; at += kTile) {
    const int n = last - at < kTile ? int(last - at) : kTile;
    if (!eval_ids(job, at, n, row0, row1, v, error)) return nullptr;
    memcpy(ids + (at - first), v.i, n * sizeof(int64_t));
  }
  return ids;
}

template <class Row>
bool sum_evaluated_bags(const Job& job, int64_t row0, int64_t row1, Error& error) {
  while (row0 < row1) {
    int64_t first, last, from, to, row = row0 + 1;
    if (!ids_of_row(job, row0, first, last, error)) return false;
    for (; row < row1; row++, last = to) {
      if (!ids_of_row(job, row, from, to, error)) return false;
      if (to - first > kMostEvaluated) break;
    }
    const int64_t* ids = evaluated(job, first, last, row0, row, error);
    if (!ids || !PlainBags<Row, int64_t>{job, ids - first, row0, row, first, last}.run(error)) return false;
    row0 = row;
  }
  return true;
}

template <class Row>
bool sum_bags_of(const Job& job, int64_t row0, int64_t row1, Error& error) {
  if (job.program.size || !reads_ids(job)) return sum_evaluated_bags<Row>(job, row0, row1, error);
  return job.ids.dtype == kInt64 ? sum_plain_bags<Row, int64_t>(job, row0, row1, error) : sum_plain_bags<Row, int32_t>(job, row0, row1, error);
}

inline bool sum_plain_bags(const Job& job, int64_t row0, int64_t row1, Error& error) {
  switch (job.table.dtype) {
    case kUInt8: return sum_bags_of<CodesRow>(job, row0, row1, error);
    case kBFloat16: return sum_bags_of<BFloat16Row>(job, row0, row1, error);
    default: return sum_bags_of<FloatRow>(job, row0, row1, error);
  }
}

}  // namespace fxopt::FXOPT_ISA
