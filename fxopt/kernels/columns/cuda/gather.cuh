// Lookups and copies without pooling: a thread of a warp evaluates an id, then the warp moves 32 rows in wide chunks.
#pragma once
#include "errors.cuh"

namespace fxopt::cuda {

constexpr int kChunksAhead = 4;  // that a thread loads before it stores the first

FXOPT_DEVICE char* output(const Launch& launch, const Record& record, int64_t row, int64_t lane) {
  char* out = reinterpret_cast<char*>(launch.words[record.out_word]) + record.out_offset + row * record.out_stride;
  return out + lane * record.dim * size_of(record.out_dtype);
}

FXOPT_DEVICE int64_t shuffle(int64_t x, int from) { return __shfl_sync(kAll, static_cast<long long>(x), from); }

template <class T>
FXOPT_DEVICE T poison() {  // NaN in every float type: a bad id that nobody asked about shows
  T x;
  memset(&x, 0xff, sizeof x);
  return x;
}

// `from` and `to` are this thread's table row (0: a bad id) and output row; the first `live` threads have one.
template <class T>
FXOPT_DEVICE void move_rows(const Record& record, int64_t from, int64_t to, int live) {
  const uint32_t thread = threadIdx.x & 31, chunks = record.chunks, total = live * chunks;
  for (uint32_t first = 0; first < total; first += 32 * kChunksAhead) {
    T value[kChunksAhead];
    int64_t target[kChunksAhead];
#pragma unroll
    for (int u = 0; u < kChunksAhead; u++) {
      target[u] = 0;
      if (first + u * 32 >= total) continue;
      const uint32_t number = first + u * 32 + thread, row = chunks == 1 ? number : __umulhi(number, record.chunk_magic);
      const int64_t at = int64_t(number - row * chunks) * int64_t(sizeof(T));
      const int64_t source = shuffle(from, int(row & 31)), out = shuffle(to, int(row & 31));
      if (number >= total) continue;
      target[u] = out + at;
      value[u] = source ? __ldg(reinterpret_cast<const T*>(source + at)) : poison<T>();
    }
#pragma unroll
    for (int u = 0; u < kChunksAhead; u++)
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

// What a row is divided by; `kept` of its lanes count.
template <class A>
FXOPT_DEVICE A divisor(const Launch& launch, const Record& record, int64_t row, int64_t kept) {
  if (!(record.flags & kDivides)) return A(1);
  const Values& values = launch.rares[record.extra].divisor;
  Outcome found;
  if (record.flags & kCounted) {
    found.v.i = kept;
    found = run_steps(launch.steps + values.steps_at, values.n_steps, found.v, kInt64, 0, nullptr, -1);
  } else {
    found = evaluate(launch, values, nullptr, row, 0);
  }
  return as_number<A>(found.v, values.dtype);
}

template <class A>
FXOPT_DEVICE void put(const Record& record, char* out, A x, A by) {
  if (record.flags & kDivides) x = rounded(x, record.out_dtype) / by;
  if (record.flags & kAdd) x = reload<A>(out, record.out_dtype) + rounded(x, record.out_dtype);
  store_value(out, record.out_dtype, x);
}

// Rows that change on the way: another dtype, strided columns, an addition, a division.
template <class A>
__device__ __noinline__ void convert_rows(const Launch& launch, const Record& record, int64_t id, int64_t to, int64_t row, int live) {
  const int size = size_of(record.out_dtype), dtype = record.table_dtype;
  const A by = divisor<A>(launch, record, row, record.lanes);
  for (int k = 0; k < live; k++) {
    const int64_t one = shuffle(id, k), out = shuffle(to, k);
    const A one_by = __shfl_sync(kAll, by, k);
    const char* from = record.table + one * record.table_stride;
    for (int64_t d = threadIdx.x & 31; d < record.dim; d += 32) {
      const A x = one < 0 ? A(NAN) : as_number<A>(load_value(from + d * record.column_stride, dtype), dtype);
      put(record, reinterpret_cast<char*>(out) + d * size, x, one_by);
    }
  }
}

// Values of a column without a table, as the output's dtype.
FXOPT_DEVICE void put_value(const Launch& launch, const Record& record, Value v, char* out, int64_t row) {
  if (record.flags & kAccurate) put(record, out, as_double(v, record.ids.dtype), divisor<double>(launch, record, row, 1));
  else put(record, out, cast(v, record.ids.dtype, record.out_dtype).f, divisor<float>(launch, record, row, 1));
}

// Positions [first, first + 32) of one column, below `last`.
FXOPT_DEVICE void run_positions(const Launch& launch, const Record& record, const char* edges, int64_t first, int64_t last) {
  const int thread = threadIdx.x & 31, live = last - first < 32 ? int(last - first) : 32;
  const bool wanted = thread < live;
  const int64_t position = wanted ? first + thread : first;
  const int64_t row = record.lanes == 1 ? position : position / record.lanes, lane = position - row * record.lanes;
  const Value v = evaluate(launch, record.ids, edges, row, lane).v;
  char* out = output(launch, record, row, lane);
  if (record.kind == kCopy) {
    if (wanted) put_value(launch, record, v, out, row);
    return;
  }
  const int64_t id = checked(launch, record, wanted, v.i, row, lane), to = reinterpret_cast<int64_t>(out);
  if (record.kind == kRows) move_rows(record, id < 0 ? 0 : reinterpret_cast<int64_t>(record.table) + id * record.table_stride, to, live);
  else if (record.flags & kAccurate) convert_rows<double>(launch, record, id, to, row, live);
  else convert_rows<float>(launch, record, id, to, row, live);
}

// The boundaries of a column's first bucketize, copied to this warp's shared memory in one go.
FXOPT_DEVICE const char* stage_edges(const Launch& launch, const Record& record, char* shared) {
  if (record.ids.edges < 0) return nullptr;
  const Step& step = launch.steps[record.ids.steps_at + record.ids.edges];
  for (int k = threadIdx.x & 31; k < step.n; k += 32) reinterpret_cast<float*>(shared)[k] = load_as<float>(step.tensor + k * step.stride);
  __syncwarp();
  return shared;
}

}  // namespace fxopt::cuda
