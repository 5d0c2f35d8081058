// Plain bags: sums and means of contiguous rows of floats, in half of their bits or a quarter. All bags of a work item are one loop over ids, in which an id is
// checked when its row is fetched ahead. 1M x 64, 50 ids a bag: 7.0 ns an id; checked bag by bag 7.5, as Pooling does it
// 8.5, F.embedding_bag 9.2. Ids that a program makes are made first.
#pragma once
#include "accumulate.h"

namespace fxopt::FXOPT_ISA {

constexpr int kMostVectors = 8;  // sums that stay in registers

constexpr int64_t kMostEvaluated = 1 << 13;  // ids made at a time, where one bag does not hold more: 64 KB

inline bool reads_ids(const Job& job) {
  const View& ids = job.ids;
  const int64_t size = ids.dtype == kInt64 ? 8 : ids.dtype == kInt32 ? 4 : 0;
  return size && (ids.stride[2] == size || ids.rows <= 1) && ids.n[2] == ids.rows;
}

inline bool is_plain_bags(const Job& job) {
  const int64_t vectors = job.dim * 4 / FXOPT_VECTOR_BYTES;
  const bool power = vectors > 0 && vectors <= kMostVectors && !(vectors & (vectors - 1));
  const bool in_registers = job.dim == 8 || (power && job.dim * 4 == vectors * FXOPT_VECTOR_BYTES);
  return job.offsets && (job.column->pool == kSum || job.column->pool == kMean) && (job.program.size || reads_ids(job)) &&
         !job.weights.data && !job.divides() && !job.has(kWrapNegative) && !job.has(kHasPadding) && !job.has(kIsMasked) &&
         !job.has(kAdd) && job.out_dtype == kFloat && in_registers &&
         (job.table.dtype == kFloat || job.table.dtype == kBFloat16 || job.table.dtype == kUInt8) &&
         job.table.column_stride == element_size(job.table.dtype);
}

struct FloatRow {
  static constexpr int kBytes = 4, kExtra = 0;  // of an element; of a row beside them
  const char* data;

  FloatRow(const char* data, int64_t) : data(data) {}
  template <class V>
  V at(int i) const { return load_vector<V>(data + i * sizeof(V)); }
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

  // `sum` is one vector of BYTES for each I.
  template <int BYTES, int... I>
  bool run(std::integer_sequence<int, I...>, Error& error) const {
    using V = typename Vector<float, BYTES>::type;
    constexpr int kStep = BYTES / 4 * Row::kBytes, kLine = kStep < 64 ? 64 / kStep : 1;  // vectors in a cache line
    const bool mean = job.column->pool == kMean, prefetch = job.table.prefetch;
    if (!start(error)) return false;
    for (int64_t row = row0; row < row1; row++) {
      int64_t from, to;
      if (!bag_range(job, row, from, to, error)) return false;
      if (to > last) to = last;  // then a later bag shrinks, which fails the call
      V sum[sizeof...(I)] = {};
      for (int64_t k = from; k < to; k++) {
        const int64_t next = ahead(k + kFarAhead);
        if (__builtin_expect(bad(next), false)) return fail(next, error);
        if (prefetch) {
          const char *far = row_of(next), *near = row_of(ahead(k + kAhead));
          ((I % kLine == 0 ? __builtin_prefetch((I ? near : far) + I * kStep) : void()), ...);
          if (Row::kExtra) __builtin_prefetch(near + sizeof...(I) * kStep);
        }
        const Row values(row_of(k), job.dim);
        ((sum[I] += values.template at<V>(I)), ...);
      }
      if (mean) {
        const float n = from == to && !job.has(kEmptyNan) ? 1 : float(to - from);
        ((sum[I] /= V{} + n), ...);
      }
      char* out = job.out + row * job.out_stride;
      (memcpy(out + I * BYTES, &sum[I], BYTES), ...);
    }
    return true;
  }

  template <int BYTES, int N>
  bool run(Error& error) const { return run<BYTES>(std::make_integer_sequence<int, N>(), error); }

  bool run(Error& error) const {
    constexpr int kBytes = FXOPT_VECTOR_BYTES;
    switch (job.dim * 4 / kBytes) {
      case 0: return run<kBytes / 2, 1>(error);
      case 1: return run<kBytes, 1>(error);
      case 2: return run<kBytes, 2>(error);
      case 4: return run<kBytes, 4>(error);
      default: return run<kBytes, kMostVectors>(error);
    }
  }
};

template <class Row, class Id>
bool sum_plain_bags(const Job& job, int64_t row0, int64_t row1, Error& error) {
  int64_t first, last, unused;
  if (!bag_range(job, row0, first, unused, error) || !bag_range(job, row1 - 1, unused, last, error)) return false;
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
    if (!bag_range(job, row0, first, last, error)) return false;
    for (; row < row1; row++, last = to) {
      if (!bag_range(job, row, from, to, error)) return false;
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
  if (job.program.size) return sum_evaluated_bags<Row>(job, row0, row1, error);
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
