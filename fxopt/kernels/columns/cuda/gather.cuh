// Lookups and copies without pooling, in general: any program, dtype and stride, additions, divisions, bad ids. A thread
// of a warp evaluates a position, then all move the 32 rows, several at a time.
#pragma once
#include "errors.cuh"

namespace fxopt::cuda {

FXOPT_DEVICE char* output(const Launch& launch, const Record& record, int64_t row, int64_t lane) {
  char* out = reinterpret_cast<char*>(launch.words[record.out_word]) + record.out_offset + row * record.out_stride;
  return out + lane * record.dim * element_size(record.out_dtype);
}

FXOPT_DEVICE int64_t shuffle(int64_t x, int from) { return __shfl_sync(kAll, static_cast<long long>(x), from); }
FXOPT_DEVICE int shuffle(int x, int from) { return __shfl_sync(kAll, x, from); }

FXOPT_DEVICE void split(const Record& record, uint32_t position, uint32_t& row, uint32_t& lane) {
  row = record.flags & kFlat ? position : position / uint32_t(record.lanes);
  lane = record.flags & kFlat ? 0 : position - row * uint32_t(record.lanes);
}

// What a row is divided by; `kept` of its lanes count.
template <class A>
FXOPT_DEVICE A divisor(const Launch& launch, const Record& record, int64_t row, int64_t kept) {
  if (!(record.flags & kDivides)) return A(1);
  const Values& values = launch.rares[record.extra].divisor;
  if (!(record.flags & kCounted)) return as_number<A>(evaluate(launch, values, row, 0).v, values.dtype);
  return as_number<A>(run_steps(launch.steps + values.steps_at, values.n_steps, number(kept), kInt64, 0).v, values.dtype);
}

template <class A>
FXOPT_DEVICE void put(const Record& record, char* out, A x, A by) {
  if (record.flags & kDivides) x = rounded(x, record.out_dtype) / by;
  if (record.flags & kAdd) x = reload<A>(out, record.out_dtype) + rounded(x, record.out_dtype);
  store_value(out, record.out_dtype, x);
}

constexpr int kOnTheirWay = 4;  // loads of a thread

// Element d of N rows: of the ids that the threads first, first + step and so on hold. Below 0: `none` in its place.
template <class A, int N, class Id>
FXOPT_DEVICE void elements(const Record& record, Id id, int first, int step, int64_t d, A none, A (&x)[N]) {
  auto all = [&](auto load) {
#pragma unroll
    for (int u = 0; u < N; u++) {
      const Id one = shuffle(id, first + u * step);
      x[u] = one < 0 ? none : A(load(record.table + one * record.table_stride));
    }
  };
  const int64_t at = d * record.column_stride;
  switch (record.table_dtype) {  // around the loads, so that none of them waits for another
    case kFloat: return all([&](const char* row) { return load_as<float>(row + at); });
    case kDouble: return all([&](const char* row) { return load_as<double>(row + at); });
    case kHalf: return all([&](const char* row) { return half_to_float(load_as<uint16_t>(row + at)); });
    case kBFloat16: return all([&](const char* row) { return bfloat16_to_float(load_as<uint16_t>(row + at)); });
    default: return all([&](const char* row) { return code_value(record, row, d); });
  }
}

// Rows of 32 positions, of which `live` are real. A thread's own row has this `id`, below 0 for one outside the table, goes to
// `out` and is divided by `by`. As many lanes as fit take a row, and each has several rows on their way.
template <class A>
FXOPT_DEVICE void convert_rows(const Record& record, int64_t id, char* out, A by, int live) {
  const int thread = threadIdx.x & 31, log2 = record.group_log2, together = 32 >> log2, size = element_size(record.out_dtype);
#pragma unroll 1
  for (int first = thread >> log2; first - (thread >> log2) < live; first += kOnTheirWay * together) {
#pragma unroll 1
    for (int64_t block = 0; block < record.dim; block += 1 << log2) {
      const int64_t d = block + (thread & ((1 << log2) - 1)), own = d < record.dim ? d : 0;
      A x[kOnTheirWay];
      elements(record, id, first, together, own, A(NAN), x);
#pragma unroll
      for (int u = 0; u < kOnTheirWay; u++) {
        const int row = first + u * together;
        char* to = reinterpret_cast<char*>(shuffle(reinterpret_cast<int64_t>(out), row));
        const A divided_by = __shfl_sync(kAll, by, row);
        if (row < live && d < record.dim) put(record, to + d * size, x[u], divided_by);
      }
    }
  }
}

// Positions [first, last) of one column.
__device__ __noinline__ void run_positions(const Launch& launch, const Record& record, uint32_t first, uint32_t last) {
  const bool accurate = record.flags & kAccurate;
#pragma unroll 1
  for (; first < last; first += 32) {
    const uint32_t mine = first + (threadIdx.x & 31);
    const bool wanted = mine < last;
    uint32_t row, lane;
    split(record, wanted ? mine : first, row, lane);
    const Value v = evaluate(launch, record.ids, row, lane).v;
    char* out = output(launch, record, row, lane);
    if (record.kind != kCopy) {
      const int64_t id = checked(launch, record, wanted, v.i, mine);
      const int live = last - first < 32 ? int(last - first) : 32;
      if (accurate) convert_rows<double>(record, id, out, divisor<double>(launch, record, row, record.lanes), live);
      else convert_rows<float>(record, id, out, divisor<float>(launch, record, row, record.lanes), live);
    } else if (wanted) {
      if (accurate) put(record, out, as_double(v, record.ids.dtype), divisor<double>(launch, record, row, 1));
      else put(record, out, cast(v, record.ids.dtype, record.out_dtype).f, divisor<float>(launch, record, row, 1));
    }
  }
}

}  // namespace fxopt::cuda
