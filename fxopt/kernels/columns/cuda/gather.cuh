// Lookups and copies without pooling: a thread of a warp evaluates an id, then the warp moves 32 rows in wide chunks.
#pragma once
#include "errors.cuh"

namespace fxopt::cuda {

constexpr int kRowsAhead = 4;  // chunks a thread loads before it stores the first

template <class L>
FXOPT_DEVICE char* output(const L& launch, const Record& record, int64_t row, int64_t lane) {
  char* out = reinterpret_cast<char*>(launch.words[record.out_word]) + record.out_offset + row * record.out_stride;
  return out + lane * record.dim * size_of(record.out_dtype);
}

FXOPT_DEVICE int64_t shuffle(int64_t x, int from) { return __shfl_sync(kAll, static_cast<long long>(x), from); }

// Chunk `number` of 32 rows: which row, and which chunk of it.
FXOPT_DEVICE int row_of_chunk(const Record& record, uint32_t number) {
  return record.chunks == 1 ? int(number) : int(__umulhi(number, record.chunk_magic));
}

template <class T>
FXOPT_DEVICE T poison() {
  T x;
  memset(&x, 0xff, sizeof x);  // NaN in every float type: a bad id that nobody asked about shows
  return x;
}

// `from` and `to` are this thread's table row and output row; `live` threads of the warp have one.
template <class T>
FXOPT_DEVICE void move_rows(const Record& record, int64_t from, int64_t to, int live) {
  const int thread = threadIdx.x & 31;
  const uint32_t total = live * record.chunks, rounds = (total + 31) / 32;
  for (uint32_t round = 0; round < rounds; round += kRowsAhead) {
    T value[kRowsAhead];
    int64_t target[kRowsAhead];
#pragma unroll
    for (int u = 0; u < kRowsAhead; u++) {
      target[u] = 0;
      if (round + u >= rounds) continue;
      const uint32_t number = (round + u) * 32 + thread;
      const int row = row_of_chunk(record, number);
      const int64_t at = int64_t(number - row * record.chunks) * sizeof(T);
      const int64_t source = shuffle(from, row & 31), out = shuffle(to, row & 31);
      if (number >= total) continue;
      target[u] = out + at;
      value[u] = source ? __ldg(reinterpret_cast<const T*>(source + at)) : poison<T>();
    }
#pragma unroll
    for (int u = 0; u < kRowsAhead; u++)
      if (target[u]) *reinterpret_cast<T*>(target[u]) = value[u];
  }
}

FXOPT_DEVICE void move_rows(const Record& record, int64_t from, int64_t to, int live) {
  switch (record.chunk_bytes) {
    case 16: return move_rows<uint4>(record, from, to, live);
    case 8: return move_rows<unsigned long long>(record, from, to, live);
    case 4: return move_rows<unsigned int>(record, from, to, live);
    default: return move_rows<unsigned short>(record, from, to, live);
  }
}

template <class A, class L>
FXOPT_DEVICE void put(const L& launch, const Record& record, char* out, A x, int64_t row) {
  if (record.extra >= 0) {
    const View& divisor = launch.head.extras[record.extra].divisor;
    if (divisor.word >= 0) x = rounded(x, record.out_dtype) / as_number<A>(load(launch, divisor, row, 0), divisor.dtype);
  }
  if (record.flags & kAdd) x = reload<A>(out, record.out_dtype) + rounded(x, record.out_dtype);
  store_value(out, record.out_dtype, x);
}

// Rows that change on the way: another dtype, strided columns, an addition, a division.
template <class A, class L>
__device__ __noinline__ void convert_rows(const L& launch, const Record& record, int64_t id, int64_t to, int64_t row, int live) {
  const int size = size_of(record.out_dtype);
  for (int k = 0; k < live; k++) {
    const int64_t one = shuffle(id, k), out = shuffle(to, k), out_row = shuffle(row, k);
    for (int64_t d = threadIdx.x & 31; d < record.dim; d += 32) {
      A x = A(NAN);
      if (one >= 0) x = as_number<A>(load_value(record.table + one * record.table_stride + d * record.column_stride, record.table_dtype), record.table_dtype);
      put(launch, record, reinterpret_cast<char*>(out) + d * size, x, out_row);
    }
  }
}

// Values of a column without a table, as the output's dtype.
template <class L>
FXOPT_DEVICE void put_value(const L& launch, const Record& record, Value v, int dtype, char* out, int64_t row) {
  if (record.flags & kAccurate) put<double>(launch, record, out, as_double(v, dtype), row);
  else put<float>(launch, record, out, cast(v, dtype, record.out_dtype).f, row);
}

// Positions [first, first + 32) of one column.
template <class L>
FXOPT_DEVICE void run_positions(const L& launch, const Record& record, const char* edges, int64_t first, int64_t positions) {
  const int thread = threadIdx.x & 31;
  const int live = positions - first < 32 ? int(positions - first) : 32;
  const bool wanted = thread < live;
  const int64_t position = wanted ? first + thread : first;
  int64_t row = position, lane = 0;
  if (record.lanes != 1) {
    row = position / record.lanes;
    lane = position - row * record.lanes;
  }
  int dtype;
  const Value v = evaluate(launch, record, edges, row, lane, dtype);
  char* out = output(launch, record, row, lane);
  if (record.kind == kValues) {
    if (wanted) put_value(launch, record, v, dtype, out, row);
    return;
  }
  const int64_t id = checked(launch, record, wanted, v.i, row, lane);
  if (record.kind == kRows) {
    const int64_t from = id < 0 ? 0 : reinterpret_cast<int64_t>(record.table) + id * record.table_stride;
    move_rows(record, from, reinterpret_cast<int64_t>(out), live);
  } else if (record.flags & kAccurate) {
    convert_rows<double>(launch, record, id, reinterpret_cast<int64_t>(out), row, live);
  } else {
    convert_rows<float>(launch, record, id, reinterpret_cast<int64_t>(out), row, live);
  }
}

// The boundaries of a column's first bucketize, copied to this warp's shared memory in one go.
template <class L>
FXOPT_DEVICE const char* stage_edges(const L& launch, const Record& record, char* shared) {
  if (record.edges < 0) return nullptr;
  const Step& step = launch.head.steps[record.steps_at + record.edges];
  const char* from = reinterpret_cast<const char*>(launch.words[step.word]);
  __syncwarp();  // nobody reads the last column's any more
  for (int k = threadIdx.x & 31; k < int(step.n); k += 32)
    reinterpret_cast<float*>(shared)[k] = load_as<float>(from + k * step.stride);
  __syncwarp();
  return shared;
}

}  // namespace fxopt::cuda
