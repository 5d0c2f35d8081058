// Lookups and copies without pooling, in general: any program, dtype and stride, additions, divisions, bad ids. A thread
// of a warp evaluates a position, then all move the 32 rows.
#pragma once
#include "errors.cuh"

namespace fxopt::cuda {

FXOPT_DEVICE char* output(const Launch& launch, const Record& record, int64_t row, int64_t lane) {
  char* out = reinterpret_cast<char*>(launch.words[record.out_word]) + record.out_offset + row * record.out_stride;
  return out + lane * record.dim * element_size(record.out_dtype);
}

FXOPT_DEVICE int64_t shuffle(int64_t x, int from) { return __shfl_sync(kAll, static_cast<long long>(x), from); }

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

// Rows of 32 positions, an element a lane; `id` is this thread's, kBad for one outside the table.
template <class A>
FXOPT_DEVICE void convert_rows(const Launch& launch, const Record& record, int64_t id, uint32_t first, uint32_t last) {
  const int size = element_size(record.out_dtype);
#pragma unroll 1
  for (int k = 0; k < 32 && first + k < last; k++) {
    uint32_t row, lane;
    split(record, first + k, row, lane);
    const int64_t one = shuffle(id, k);
    const char* from = record.table + one * record.table_stride;
    char* out = output(launch, record, row, lane);
    const A by = divisor<A>(launch, record, row, record.lanes);
#pragma unroll 1
    for (int64_t d = threadIdx.x & 31; d < record.dim; d += 32) {
      const A x = one < 0 ? A(NAN) : row_value<A>(record, from, d);
      put(record, out + d * size, x, by);
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
    if (record.kind != kCopy) {
      const int64_t id = checked(launch, record, wanted, v.i, mine);
      if (accurate) convert_rows<double>(launch, record, id, first, last);
      else convert_rows<float>(launch, record, id, first, last);
    } else if (wanted) {
      char* out = output(launch, record, row, lane);
      if (accurate) put(record, out, as_double(v, record.ids.dtype), divisor<double>(launch, record, row, 1));
      else put(record, out, cast(v, record.ids.dtype, record.out_dtype).f, divisor<float>(launch, record, row, 1));
    }
  }
}

}  // namespace fxopt::cuda
