// The common lookups, and copies: rows that move as they are, or become floats from 8 bits. A thread evaluates kPerThread ids side by side, then the
// warp moves their rows in wide chunks.
#pragma once
#include "codes.cuh"

namespace fxopt::cuda {

constexpr int kPerThread = 4;

// Boundaries in shared memory: `n` of them, then infinity up to 8 groups of 16 (or 32) slots. Where they are sorted, any
// order of looking finds the same place, so this one takes two loads of four: the last boundary of each group is in
// registers, those that quarter a group are behind the boundaries, and a quarter is a leaf. (A binary search's seven
// dependent loads, at random banks, were half of all waiting.)
struct Edges {
  int n;
  bool sorted, wide;  // groups of 32
  float last[kGroups - 1];
};

template <bool RIGHT>
FXOPT_DEVICE int passed(float boundary, float v) { return RIGHT ? !(boundary > v) : !(boundary >= v); }

template <bool RIGHT>
FXOPT_DEVICE int passed(const float* four, float v) {
  const float4 b = *reinterpret_cast<const float4*>(four);
  return passed<RIGHT>(b.x, v) + passed<RIGHT>(b.y, v) + passed<RIGHT>(b.z, v) + passed<RIGHT>(b.w, v);
}

template <bool RIGHT>
FXOPT_DEVICE void bucketize(const float* data, const Edges& edges, const float (&v)[kPerThread], int64_t (&id)[kPerThread]) {
  if (!edges.sorted) {
#pragma unroll
    for (int k = 0; k < kPerThread; k++) id[k] = search<float, RIGHT>(edges.n, v[k], [&](int at) { return data[at]; });
    return;
  }
  const int leaf = edges.wide ? 8 : 4;
  int at[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; k++) {
    int group = 0;
#pragma unroll
    for (int g = 0; g < kGroups - 1; g++) group += passed<RIGHT>(edges.last[g], v[k]);
    at[k] = group;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; k++) {
    const float4 quarters = *reinterpret_cast<const float4*>(data + kEdges + at[k] * 4);
    at[k] = (at[k] * 4 + passed<RIGHT>(quarters.x, v[k]) + passed<RIGHT>(quarters.y, v[k]) + passed<RIGHT>(quarters.z, v[k])) * leaf;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; k++) {
    int found = at[k] + passed<RIGHT>(data + at[k], v[k]);
    if (edges.wide) found += passed<RIGHT>(data + at[k] + 4, v[k]);
    id[k] = found < edges.n ? found : edges.n;  // infinite and NaN values go on into the padding
  }
}

// The boundaries of a column's first bucketize, copied to this warp's shared memory in one go.
FXOPT_DEVICE Edges stage_edges(const Record& record, float* shared) {
  const int n = record.n_edges, thread = threadIdx.x & 31;
  Edges edges{n, true, n >= kEdges / 2};
  if (record.way != kStagedBucketize) return edges;
  __syncwarp();  // nobody reads the last column's any more
  const int stride = record.edges_stride, slots = edges.wide ? kEdges : kEdges / 2, group = slots / kGroups;
  const char* from = record.edges;
#pragma unroll 1
  for (int at = 0; at < slots; at += 128) {  // four loads on their way at a time
    float mine[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const int k = at + u * 32 + thread;
      mine[u] = k < n ? load_as<float>(from + k * stride) : INFINITY;
    }
#pragma unroll
    for (int u = 0; u < 4; u++) shared[at + u * 32 + thread] = mine[u];
  }
  __syncwarp();
  bool sorted = true;
#pragma unroll 1
  for (int k = thread; k + 1 < n; k += 32) sorted &= shared[k] <= shared[k + 1];
  const float end = shared[thread / 4 * group + (thread % 4 + 1) * (group / 4) - 1];  // of a quarter of a group
  shared[kEdges + thread] = end;
#pragma unroll
  for (int g = 0; g < kGroups - 1; g++) edges.last[g] = __shfl_sync(kAll, end, g * 4 + 3);
  edges.sorted = __all_sync(kAll, sorted) != 0;
  __syncwarp();
  return edges;
}

template <class T>
FXOPT_DEVICE void load_flat(const char* data, uint32_t step, const uint32_t (&place)[kPerThread], T (&v)[kPerThread]) {
#pragma unroll
  for (int k = 0; k < kPerThread; k++) v[k] = load_as<T>(data + uint64_t(place[k]) * step);
}

// Positions as places, in steps of record.places.step bytes.
FXOPT_DEVICE void find_places(const Record& record, const uint32_t (&position)[kPerThread], uint32_t (&place)[kPerThread]) {
  const Places& places = record.places;
#pragma unroll
  for (int k = 0; k < kPerThread; k++) {
    place[k] = position[k];
    if (!places.inner) continue;
    const uint32_t outer = position[k] / places.inner;
    place[k] = outer * places.outer_step + (position[k] - outer * places.inner) * places.inner_step;
  }
}

// What ids are found from: integers, or the bits of floats.
FXOPT_DEVICE void load_sources(const Launch& launch, const Record& record, const uint32_t (&place)[kPerThread], int64_t (&source)[kPerThread]) {
  const View& view = record.ids.view;
  const char* data = reinterpret_cast<const char*>(launch.words[view.word]) + view.offset;
  const uint32_t step = uint32_t(record.places.step);
  if (view.dtype == kInt64) {
    long long v[kPerThread];
    load_flat(data, step, place, v);
#pragma unroll
    for (int k = 0; k < kPerThread; k++) source[k] = v[k];
    return;
  }
  int v[kPerThread];
  load_flat(data, step, place, v);
#pragma unroll
  for (int k = 0; k < kPerThread; k++) source[k] = v[k];
}

// Adds to ids at these positions what the record's step has for their rows of the inner dim.
FXOPT_DEVICE void add_tensor(const Launch& launch, const Record& record, const uint32_t (&position)[kPerThread], int64_t (&id)[kPerThread]) {
  const Step& step = launch.steps[record.ids.steps_at];
  const char* data = step.tensor;
  const int64_t stride = step.stride;
#pragma unroll
  for (int k = 0; k < kPerThread; k++) id[k] = int64_t(uint64_t(id[k]) + uint64_t(load_as<long long>(data + position[k] % record.places.inner * stride)));
}

// The record's program on values at these positions, of which `live` are not the first one again.
FXOPT_DEVICE void run_program(const Launch& launch, const Record& record, const uint32_t (&position)[kPerThread], uint32_t live, int64_t (&id)[kPerThread]) {
  const Values& ids = record.ids;
  const uint32_t inner = uint32_t(ids.view.inner);
#pragma unroll
  for (int k = 0; k < kPerThread; k++) {
    if (k == 0 || k * 32 < live) id[k] = run_steps(launch.steps + ids.steps_at, ids.n_steps, number(id[k]), ids.view.dtype, inner ? position[k] % inner : 0).v.i;
    else id[k] = id[0];
  }
}

// Ids in place of what they are found from, by the record's way. Positions matter where there is an inner dim.
FXOPT_DEVICE void find_ids(const Launch& launch, const Record& record, const float* shared, const Edges& edges, const uint32_t (&position)[kPerThread],
                           uint32_t live, int64_t (&id)[kPerThread]) {
  if (record.way == kAddition) {
    add_tensor(launch, record, position, id);
  } else if (record.way == kSteps) {
    run_program(launch, record, position, live, id);
  } else if (record.way == kStagedBucketize) {
    float v[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; k++) v[k] = __uint_as_float(uint32_t(id[k]));
    const bool right = launch.steps[record.ids.steps_at].a;
    right ? bucketize<true>(shared, edges, v, id) : bucketize<false>(shared, edges, v, id);
  } else if (record.way == kTruncate) {
#pragma unroll
    for (int k = 0; k < kPerThread; k++) id[k] = truncate(__uint_as_float(uint32_t(id[k])), kInt64);
  } else if (record.way == kLongRemainder) {
    const Step step = launch.steps[record.ids.steps_at];
#pragma unroll
    for (int k = 0; k < kPerThread; k++) id[k] = remainder(step.a, step.magic, id[k]);
  }
  if (!(record.flags & kWrapNegative)) return;
#pragma unroll
  for (int k = 0; k < kPerThread; k++) id[k] += id[k] < 0 ? record.table_rows : 0;
}

// Table rows `ids` of positions 32 k + thread, the first `live` of them, in chunks of type T. All 32 threads load kPerThread
// chunks before they store the first: as many of each of GROUPS groups of 32 rows, which hold all that are live. Streaming
// stores leave the cache to the tables: 880 columns of 32, batch 2048, on an H200 take 89 us with them and 100 without.
template <class T, int GROUPS>
FXOPT_DEVICE void move_groups(const Record& record, const char* table, const int (&ids)[kPerThread], char* out, uint32_t live) {
  constexpr int kOfEach = kPerThread / GROUPS;
  const uint32_t thread = threadIdx.x & 31, chunks = record.chunks, magic = record.chunk_magic;
  const uint32_t table_stride = uint32_t(record.table_stride), out_stride = uint32_t(record.out_stride);
#pragma unroll 1
  for (uint32_t number = thread; number < 32 * chunks; number += 32 * kOfEach) {
    uint32_t slot[kOfEach], at[kOfEach];  // behind the last chunk they begin again, and nothing is stored
    T value[kPerThread];
#pragma unroll
    for (int c = 0; c < kOfEach; c++) {
      slot[c] = chunks == 1 ? number + c * 32 : __umulhi(number + c * 32, magic);
      at[c] = (number + c * 32 - slot[c] * chunks) * uint32_t(sizeof(T));
    }
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
      const int c = k / GROUPS, id = __shfl_sync(kAll, ids[k % GROUPS], int(slot[c]));
      value[k] = __ldg(reinterpret_cast<const T*>(table + at[c] + uint64_t(uint32_t(id)) * table_stride));
    }
#pragma unroll
    for (int k = 0; k < kPerThread; k++) {
      const uint32_t c = k / GROUPS, row = k % GROUPS * 32 + slot[c];
      if (row < live && (kOfEach == 1 || slot[c] < 32)) __stcs(reinterpret_cast<T*>(out + at[c] + uint64_t(row) * out_stride), value[k]);
    }
  }
}

template <class T>
FXOPT_DEVICE void move_rows(const Record& record, const char* table, const int (&ids)[kPerThread], char* out, uint32_t live) {
  if (live <= 32) move_groups<T, 1>(record, table, ids, out, live);
  else if (live <= 64) move_groups<T, 2>(record, table, ids, out, live);
  else move_groups<T, kPerThread>(record, table, ids, out, live);
}

// Positions [first, last) of a column whose `way` is known, up to those with a bad id: returns where it stopped.
FXOPT_DEVICE uint32_t run_rows(const Launch& launch, const Record& record, float* shared, uint32_t first, uint32_t last) {
  const Edges edges = stage_edges(record, shared);
#pragma unroll 1
  for (; first < last; first += 32 * kPerThread) {
    const uint32_t start = first + (threadIdx.x & 31), live = last - first < 32 * kPerThread ? last - first : 32 * kPerThread;
    uint32_t position[kPerThread], place[kPerThread];
    int64_t id[kPerThread];
    int row[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; k++) position[k] = start + k * 32 < last ? start + k * 32 : first;
    find_places(record, position, place);
    const char* table = record.table;
    if (record.way == kPosition) {
      table += launch.words[record.ids.view.word];
#pragma unroll
      for (int k = 0; k < kPerThread; k++) row[k] = int(place[k]);
    } else {
      load_sources(launch, record, place, id);
      find_ids(launch, record, shared, edges, position, live, id);
      bool bad = false;
      const uint64_t rows = uint64_t(record.table_rows);
#pragma unroll
      for (int k = 0; k < kPerThread; k++) {
        row[k] = int(id[k]);
        bad |= uint64_t(id[k]) >= rows;
      }
      if (__any_sync(kAll, bad)) return first;
    }
    char* out = output(launch, record, first, 0);
    switch (record.chunk_bytes) {
      case 16: move_rows<uint4>(record, table, row, out, live); break;
      case 4: move_rows<unsigned int>(record, table, row, out, live); break;
      case kCodes: widen_rows(record, table, row, out, live); break;
      default: move_rows<unsigned short>(record, table, row, out, live);
    }
  }
  return last;
}

}  // namespace fxopt::cuda
