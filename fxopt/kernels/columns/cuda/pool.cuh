// Pooled bags. Some lanes of a warp share a bag: each evaluates an id, and all take the rows in turns, 16 bytes a load.
#pragma once
#include "gather.cuh"

namespace fxopt::cuda {

constexpr int kUnroll = 8;  // rows whose loads a thread has in flight

struct BagRange {
  int64_t begin, length;
  bool broken;
};

FXOPT_DEVICE int64_t offset_at(const char* data, const Extras& extra, int64_t bag) {
  const char* from = data + bag * extra.offsets_stride;
  return extra.offsets_dtype == kInt64 ? int64_t(load_as<long long>(from)) : int64_t(load_as<int>(from));
}

// Bag `row`, within the ids whatever the offsets say. All 32 threads call it.
template <class L>
FXOPT_DEVICE BagRange bag_range(const L& launch, const Record& record, int64_t row, int64_t rows, bool wanted) {
  if (record.flags & kDense) return {0, wanted ? record.lanes : 0, false};
  const Extras& extra = launch.head.extras[record.extra];
  const int64_t n = launch.words[extra.bounds_word], n_offsets = launch.words[extra.bounds_word + 1];
  const char* offsets = reinterpret_cast<const char*>(launch.words[extra.offsets_word]);
  const int64_t bag = extra.segment * rows + row;
  int64_t begin = 0, end = 0;
  if (wanted) {
    begin = offset_at(offsets, extra, bag);
    end = bag + 1 < n_offsets ? offset_at(offsets, extra, bag + 1) : n;
  }
  const bool broken = begin < 0 || end < begin || end > n || (wanted && bag == 0 && begin != 0);
  if (!__any_sync(kAll, broken)) return {begin, end - begin, false};
  if (launch.head.mode == kRaise) report_first(launch.head.errors, broken, {kBadOffsets, record.index, row, 0, begin, end, launch.head.plan});
  return {broken ? 0 : begin, broken ? 0 : end - begin, broken};
}

// The id at `k` of a bag (-1 none, -2 bad), and its weight.
template <class A, class L>
FXOPT_DEVICE int64_t bag_id(const L& launch, const Record& record, const BagRange& bag, int64_t row, int64_t k, A& weight) {
  const bool wanted = k < bag.length, dense = record.flags & kDense;
  int64_t id = -1;
  weight = A(1);
  if (wanted) {
    int dtype;
    id = evaluate(launch, record, nullptr, dense ? row : bag.begin + k, dense ? k : 0, dtype).i;
    if (record.extra >= 0) {
      const View& weights = launch.head.extras[record.extra].weights;
      if (weights.word >= 0) weight = as_number<A>(load(launch, weights, dense ? row : bag.begin + k, dense ? k : 0), weights.dtype);
    }
  }
  const int64_t at = checked(launch, record, wanted, id, row, k);
  return at >= 0 && (record.flags & kHasPadding) && id == record.padding ? -1 : at;
}

template <class T>
struct Chunk;
template <>
struct Chunk<float> {
  static constexpr int kSize = 4;
  FXOPT_DEVICE static void add(float* sum, uint4 bits, float w) {
    sum[0] = fmaf(__uint_as_float(bits.x), w, sum[0]);
    sum[1] = fmaf(__uint_as_float(bits.y), w, sum[1]);
    sum[2] = fmaf(__uint_as_float(bits.z), w, sum[2]);
    sum[3] = fmaf(__uint_as_float(bits.w), w, sum[3]);
  }
};
template <float (*WIDEN)(uint16_t)>
struct HalfChunk {
  static constexpr int kSize = 8;
  FXOPT_DEVICE static void add(float* sum, uint4 bits, float w) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      sum[2 * k] = fmaf(WIDEN(uint16_t(words[k])), w, sum[2 * k]);
      sum[2 * k + 1] = fmaf(WIDEN(uint16_t(words[k] >> 16)), w, sum[2 * k + 1]);
    }
  }
};
struct Half {};
struct BFloat16 {};
template <>
struct Chunk<Half> : HalfChunk<half_to_float> {};
template <>
struct Chunk<BFloat16> : HalfChunk<bfloat16_to_float> {};

// What a mean divides by, and NaN where it has nothing to divide.
template <class A>
FXOPT_DEVICE A finished(const Record& record, A sum, int count, bool poisoned) {
  if (poisoned) return A(NAN);
  if (record.pool != kMean) return sum;
  return count ? sum / A(count) : (record.flags & kEmptyNan) ? A(NAN) : A(0);
}

// Sums and means of rows in 16-byte chunks; `width` lanes of the warp to a bag, 2^group_log2 of them to a row.
template <class T, class L>
__device__ __noinline__ void sum_bags(const L& launch, const Record& record, int64_t row, int64_t rows, bool wanted, int width) {
  constexpr int kSize = Chunk<T>::kSize;
  const int thread = threadIdx.x & (width - 1), group = 1 << record.group_log2, slot = thread >> record.group_log2;
  const int parallel = width >> record.group_log2, column = thread & (group - 1);
  const BagRange bag = bag_range(launch, record, row, rows, wanted);
  int longest = int(bag.length);
  for (int k = 16; k >= 1; k >>= 1) longest = max(longest, __shfl_xor_sync(kAll, longest, k));
  for (int block = 0; block < int(record.chunks); block += group) {
    const bool mine = block + column < int(record.chunks);
    const char* table = record.table + (block + column) * 16;
    float sum[kSize] = {};
    int count = 0;
    bool poisoned = bag.broken;
    for (int at = 0; at < longest; at += width) {
      float weight;
      const int64_t id = bag_id<float>(launch, record, bag, row, at + thread, weight);
      count += id >= 0;
      poisoned |= id == -2;
      for (int step = 0; step < group; step += kUnroll) {
        uint4 chunk[kUnroll];
        float w[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          w[u] = 0;
          chunk[u] = uint4{0, 0, 0, 0};
          if (step + u >= group) continue;
          const int from = (step + u) * parallel + slot;
          const int64_t one = __shfl_sync(kAll, static_cast<long long>(id), from, width);
          w[u] = __shfl_sync(kAll, weight, from, width);
          if (one >= 0 && mine) chunk[u] = __ldg(reinterpret_cast<const uint4*>(table + one * record.table_stride));
          else w[u] = 0;
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) Chunk<T>::add(sum, chunk[u], w[u]);
      }
    }
    for (int k = width >> 1; k >= 1; k >>= 1) {
      count += __shfl_xor_sync(kAll, count, k);
      poisoned |= __shfl_xor_sync(kAll, int(poisoned), k) != 0;
      if (k >= group)
#pragma unroll
        for (int d = 0; d < kSize; d++) sum[d] += __shfl_xor_sync(kAll, sum[d], k);
    }
    if (!wanted || !mine || slot) continue;
    char* out = output(launch, record, row, 0) + (block + column) * kSize * size_of(record.out_dtype);
    float done[kSize];
#pragma unroll
    for (int d = 0; d < kSize; d++) done[d] = finished(record, sum[d], count, poisoned);
    if (kSize == 4 && record.chunk_bytes == 16) {  // float to float, aligned, nothing more to do
      *reinterpret_cast<float4*>(out) = float4{done[0], done[1], done[2], done[3]};
      continue;
    }
#pragma unroll
    for (int d = 0; d < kSize; d++) put(launch, record, out + d * size_of(record.out_dtype), done[d], row);
  }
}

// Everything else: maxima, fp64, rows that 16-byte chunks do not fit. A lane owns dims, ids come one by one.
template <class A, class L>
__device__ __noinline__ void pool_any(const L& launch, const Record& record, int64_t row, int64_t rows) {
  const int thread = threadIdx.x & 31;
  const bool dense = record.flags & kDense, is_max = record.pool == kMax;
  const BagRange bag = bag_range(launch, record, row, rows, true);
  for (int64_t block = 0; block < record.dim; block += 32) {
    const int64_t d = block + thread;
    A sum = 0;
    int count = 0;
    bool poisoned = bag.broken;
    for (int64_t at = 0; at < bag.length; at += 32) {
      A weight;
      const int64_t id = bag_id<A>(launch, record, bag, row, at + thread, weight);
      poisoned |= __any_sync(kAll, id == -2) != 0;
      const int n = bag.length - at < 32 ? int(bag.length - at) : 32;
      for (int k = 0; k < n; k++) {
        const int64_t one = shuffle(id, k);
        const A w = __shfl_sync(kAll, weight, k);
        if (one < 0) continue;
        A x = A(0);
        if (d < record.dim) x = as_number<A>(load_value(record.table + one * record.table_stride + d * record.column_stride, record.table_dtype), record.table_dtype);
        if (!is_max) sum += x * w;
        else if (count == 0 || x > sum || (dense && x != x && sum == sum)) sum = x;
        count++;
      }
    }
    if (d < record.dim) put(launch, record, output(launch, record, row, 0) + d * size_of(record.out_dtype), finished(record, sum, count, poisoned), row);
  }
}

// Bags [first, first + 32 / width) of one column.
template <class L>
FXOPT_DEVICE void run_bags(const L& launch, const Record& record, int64_t first, int64_t rows, int width) {
  if (record.kind == kBagsAny) {
    for (int64_t row = first; row < rows && row < first + 32 / width; row++) {
      if (record.flags & kAccurate) pool_any<double>(launch, record, row, rows);
      else pool_any<float>(launch, record, row, rows);
    }
    return;
  }
  const int64_t row = first + (threadIdx.x & 31) / width;
  const bool wanted = row < rows;
  switch (record.table_dtype) {
    case kFloat: return sum_bags<float>(launch, record, row, rows, wanted, width);
    case kHalf: return sum_bags<Half>(launch, record, row, rows, wanted, width);
    default: return sum_bags<BFloat16>(launch, record, row, rows, wanted, width);
  }
}

}  // namespace fxopt::cuda
