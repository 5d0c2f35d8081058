// Gradients of tables, in a fixed order: every id becomes an entry (table and row, where its gradient is, a factor), the
// entries are sorted by table and row (elsewhere), and those of one row are added in the order of the ids.
#pragma once
#include "bag.cuh"

namespace fxopt::cuda {

constexpr int kTableShift = 40;  // an entry's key: table << 40 | row
constexpr int64_t kNoRow = (int64_t(1) << kTableShift) - 1;
constexpr int kChunk = 32;  // entries that a group of threads adds up

struct Place {
  int64_t row, lane, position;  // position: of its ids, as evaluate() takes it
  float scale;
  bool exists;
};

// Bag of the flat position `p`.
FXOPT_DEVICE Place jagged_place(const Launch& launch, const Record& record, int64_t p, int64_t rows) {
  const Rare& rare = launch.rares[record.extra];
  const int64_t n = launch.words[rare.bounds_word], n_offsets = launch.words[rare.bounds_word + 1], first = rare.segment * rows;
  const char* offsets = reinterpret_cast<const char*>(launch.words[rare.offsets_word]);
  int64_t low = 0, high = rows;  // bags before `low` begin at or before p
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (offset_at(offsets, rare, first + middle) <= p) low = middle + 1;
    else high = middle;
  }
  const int64_t row = low - 1;
  if (row < 0) return {0, 0, p, 0, false};
  const int64_t begin = offset_at(offsets, rare, first + row), end = first + row + 1 < n_offsets ? offset_at(offsets, rare, first + row + 1) : n;
  return {row, 0, p, record.pool == kMean ? 1.0f / float(end - begin) : 1.0f, p < end};
}

FXOPT_DEVICE Place place_of(const Launch& launch, const Record& record, int64_t p, int64_t rows) {
  if (!(record.flags & kDense) && record.pool != kNone) return jagged_place(launch, record, p, rows);
  uint32_t row, lane;
  split(record, uint32_t(p), row, lane);
  return {row, lane, row, record.pool == kMean ? 1.0f / float(record.lanes) : 1.0f, true};
}

__global__ void __launch_bounds__(256, 2) entries_kernel(const __grid_constant__ Launch launch) {
  const Record& record = launch.records[blockIdx.y];
  const Span span = launch.spans[blockIdx.y];
  int64_t* keys = reinterpret_cast<int64_t*>(launch.words[launch.entries_word]);
  int64_t* from = reinterpret_cast<int64_t*>(launch.words[launch.entries_word + 1]);
  float* scales = reinterpret_cast<float*>(launch.words[launch.entries_word + 2]);
  for (int64_t p = int64_t(blockIdx.x) * 256 + threadIdx.x; p < span.count; p += int64_t(gridDim.x) * 256) {
    const Place place = place_of(launch, record, p, span.rows);
    int64_t id = evaluate(launch, record.ids, place.position, place.lane).v.i;
    if ((record.flags & kWrapNegative) && id < 0) id += record.table_rows;
    if (launch.mode == kClamp && record.table_rows > 0) id = id < 0 ? 0 : id < record.table_rows ? id : record.table_rows - 1;
    const bool left_out = (record.flags & kHasPadding) && id == record.padding;
    const bool counts = place.exists && uint64_t(id) < uint64_t(record.table_rows) && !left_out && id != span.frozen;
    keys[span.base + p] = int64_t(span.table) << kTableShift | (counts ? id : kNoRow);
    from[span.base + p] = reinterpret_cast<int64_t>(output(launch, record, place.row, record.pool == kNone ? place.lane : 0));
    scales[span.base + p] = place.scale;
  }
}

// The table that a key names, as the gradient's address and its width.
struct Target {
  float* data;
  int64_t dim;
};

struct Sums {
  const int64_t *sorted, *order, *from;  // order: of entries, by key
  const float* scales;
  const Target* targets;
  float *head, *tail;  // [chunks, max_dim]: of a row that goes on from the chunk before, or into the next
  int64_t n, max_dim;
  int32_t group_log2, unused;  // threads to a chunk, four elements each
  const int64_t* slots;  // of each sorted entry: its row among those that are touched; null: gradients are dense
};

FXOPT_DEVICE float4 load_four(const float* from, int64_t left) {
  if (left >= 4 && reinterpret_cast<uint64_t>(from) % 16 == 0) return __ldg(reinterpret_cast<const float4*>(from));
  float4 four{0, 0, 0, 0};
  if (left > 0) four.x = __ldg(from);
  if (left > 1) four.y = __ldg(from + 1);
  if (left > 2) four.z = __ldg(from + 2);
  if (left > 3) four.w = __ldg(from + 3);
  return four;
}

FXOPT_DEVICE void store_four(float* to, int64_t left, float4 four) {
  if (left > 0) to[0] = four.x;
  if (left > 1) to[1] = four.y;
  if (left > 2) to[2] = four.z;
  if (left > 3) to[3] = four.w;
}

FXOPT_DEVICE bool is_row(int64_t key) { return (key & kNoRow) != kNoRow; }

// The row of the gradient that the sorted entry `at` belongs to.
FXOPT_DEVICE float* row_of(const Sums& sums, const Target& target, int64_t key, int64_t at) {
  return target.data + (sums.slots ? sums.slots[at] : key & kNoRow) * target.dim;
}

// Where the sum of a key's entries goes, all of them or those of one chunk; `at`: one of them.
FXOPT_DEVICE float* target_of(const Sums& sums, int64_t key, int64_t at, int64_t chunk, bool goes_on, bool goes_further, int64_t& dim) {
  const Target target = sums.targets[key >> kTableShift];
  dim = target.dim;
  if (goes_on) return sums.head + chunk * sums.max_dim;
  return goes_further ? sums.tail + chunk * sums.max_dim : row_of(sums, target, key, at);
}

// A group of threads adds the entries [32 chunk, 32 chunk + 32), in order.
__global__ void __launch_bounds__(256) sums_kernel(const __grid_constant__ Sums sums) {
  const int64_t thread = int64_t(blockIdx.x) * 256 + threadIdx.x, chunk = thread >> sums.group_log2, first = chunk * kChunk;
  if (first >= sums.n) return;
  const int64_t end = first + kChunk < sums.n ? first + kChunk : sums.n, width = int64_t(4) << sums.group_log2;
  const int64_t before = first > 0 ? sums.sorted[first - 1] : -1, behind = end < sums.n ? sums.sorted[end] : -1;
  for (int64_t d = (thread & ((1 << sums.group_log2) - 1)) * 4; d < sums.max_dim; d += width) {
    float4 sum{0, 0, 0, 0};
    int64_t key = sums.sorted[first], start = first;
    auto flush = [&](int64_t stop) {
      if (!is_row(key)) return;
      int64_t dim;
      float* to = target_of(sums, key, start, chunk, start == first && key == before, stop == end && key == behind, dim);
      store_four(to + d, dim - d, sum);
    };
    for (int64_t at = first; at < end; at += 4) {
      int64_t keys[4];
      float4 values[4];
      float scales[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const int64_t k = at + u < end ? at + u : end - 1, entry = sums.order[k];
        keys[u] = sums.sorted[k];
        scales[u] = sums.scales[entry];
        const int64_t dim = sums.targets[keys[u] >> kTableShift].dim;
        values[u] = load_four(reinterpret_cast<const float*>(sums.from[entry]) + d, is_row(keys[u]) ? dim - d : 0);
      }
#pragma unroll
      for (int u = 0; u < 4; u++) {
        if (at + u >= end) break;
        if (keys[u] != key) {
          flush(at + u);
          key = keys[u];
          start = at + u;
          sum = float4{0, 0, 0, 0};
        }
        sum.x = fmaf(scales[u], values[u].x, sum.x);
        sum.y = fmaf(scales[u], values[u].y, sum.y);
        sum.z = fmaf(scales[u], values[u].z, sum.z);
        sum.w = fmaf(scales[u], values[u].w, sum.w);
      }
    }
    flush(end);
  }
}

// A row whose entries fill several chunks: its sums, in order. The group of the chunk in which it begins does it.
__global__ void __launch_bounds__(256) joins_kernel(const __grid_constant__ Sums sums) {
  const int64_t thread = int64_t(blockIdx.x) * 256 + threadIdx.x, chunk = thread >> sums.group_log2, first = chunk * kChunk, end = first + kChunk;
  if (end >= sums.n) return;
  const int64_t key = sums.sorted[end - 1];
  if (!is_row(key) || sums.sorted[end] != key || (first > 0 && sums.sorted[first - 1] == key)) return;
  const Target target = sums.targets[key >> kTableShift];
  for (int64_t d = (thread & ((1 << sums.group_log2) - 1)) * 4; d < target.dim; d += int64_t(4) << sums.group_log2) {
    float4 sum = load_four(sums.tail + chunk * sums.max_dim + d, target.dim - d);
    for (int64_t next = chunk + 1; next * kChunk < sums.n && sums.sorted[next * kChunk] == key; next++) {
      const float4 more = load_four(sums.head + next * sums.max_dim + d, target.dim - d);
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
    }
    store_four(row_of(sums, target, key, end - 1) + d, target.dim - d, sum);
  }
}

}  // namespace fxopt::cuda
