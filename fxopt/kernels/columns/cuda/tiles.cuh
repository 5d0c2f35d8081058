// Many columns of narrow rows, eight neighbours a block at a time: a warp finds the ids of each, then all warps move the rows
// of all eight, so that what is side by side in the output is written side by side. (A column at a time, a row of 32 bytes
// is a line of its own to L2, which is busy with lines before it is with bytes.)
#pragma once
#include "rows.cuh"

namespace fxopt::cuda {

struct Tile {
  uint32_t ids[kWarps][kMostSpan + 4];  // 4 more, so that the columns' ids lie in different banks
  bool found[kWarps];
};

// A warp: the ids of positions [first, last) of a column, of the first one to fill up 32 kPerThread. False: they have to be
// looked at one by one.
FXOPT_DEVICE bool find_column(const Launch& launch, const Record& its_record, float* shared, uint32_t first, uint32_t last, uint32_t* ids) {
  const Record record = its_record;  // for all that the compiler knows, what is stored here could change it
  const uint32_t thread = threadIdx.x & 31;
  uint32_t position[kPerThread];
  int64_t next[kPerThread], id[kPerThread];
  auto load_next = [&](uint32_t from) {
#pragma unroll
    for (int k = 0; k < kPerThread; k++) position[k] = from + k * 32 + thread < last ? from + k * 32 + thread : first;
    load_sources(launch, record, position, next);
  };
  load_next(first);
  const Edges edges = stage_edges(record, shared);
#pragma unroll 1
  for (uint32_t at = first; at < last; at += 32 * kPerThread) {
    bool bad = false;
#pragma unroll
    for (int k = 0; k < kPerThread; k++) id[k] = next[k];
    if (at + 32 * kPerThread < last) load_next(at + 32 * kPerThread);
    find_ids(launch, record, shared, edges, position, 32 * kPerThread, id);
#pragma unroll
    for (int k = 0; k < kPerThread; k++) bad |= uint64_t(id[k]) >= uint64_t(record.table_rows);
    if (__any_sync(kAll, bad)) {
      if (launch.mode != kClamp || record.table_rows == 0) return false;
#pragma unroll 1
      for (int k = 0; k < kPerThread; k++) {
        const uint32_t mine = at + k * 32 + thread;
        const int64_t row = checked(launch, its_record, mine < last, id[0], mine);
        ids[mine - first] = uint32_t(row < 0 ? 0 : row);
        id[0] = id[1], id[1] = id[2], id[2] = id[3];
      }
      continue;
    }
#pragma unroll
    for (int k = 0; k < kPerThread; k++) ids[at - first + k * 32 + thread] = uint32_t(id[k]);
  }
  return true;
}

// Rows of a column from `row` on that this thread moves, 16 bytes of each. Only stores ask whether there is such a row, so
// that all loads are on their way before the first store.
template <uint32_t CHUNKS>
FXOPT_DEVICE void move_column(const char* table, uint32_t table_stride, char* out, uint32_t out_stride, const uint32_t* ids, uint32_t row, uint32_t live) {
  constexpr uint32_t kStep = 32 / CHUNKS;
  constexpr int kMoved = CHUNKS == 1 ? 4 : 8;  // rows on their way: where eight, four take 1 us more of 58
  static_assert(kMoved * kStep <= 32 * kPerThread, "so many have ids");
#pragma unroll 1
  for (; row < live; row += kMoved * kStep) {
    uint4 value[kMoved];
#pragma unroll
    for (int k = 0; k < kMoved; k++) value[k] = __ldg(reinterpret_cast<const uint4*>(table + uint64_t(ids[row + k * kStep]) * table_stride));
#pragma unroll
    for (int k = 0; k < kMoved; k++)
      if (row + k * kStep < live) __stcs(reinterpret_cast<uint4*>(out + uint64_t(row + k * kStep) * out_stride), value[k]);
  }
}

// A block: eight columns, or what is left of a segment, over the same positions. `item`: as segments number them.
FXOPT_DEVICE void run_tile(const Launch& launch, int item, float* shared, Tile& tile) {
  const Segment& segment = segment_of(launch, item);
  const unsigned groups = unsigned(segment.units + kWarps - 1) / kWarps, k = unsigned(item - segment.first_item), part = k / groups, group = k - part * groups;
  const int columns = segment.units - int(group) * kWarps, chunks = segment.chunks, warp = threadIdx.x >> 5;
  const Record* records = launch.records + segment.first_unit + group * kWarps;
  const uint32_t span = uint32_t(segment.span), first = part * span, rest = uint32_t(segment.positions) - first, live = rest < span ? rest : span;
  const int place = threadIdx.x & (kWarps * chunks - 1), column = place / chunks, row = threadIdx.x / (kWarps * chunks);
  const Record& moved = records[column < columns ? column : 0];
  const char* table = moved.table + (place & (chunks - 1)) * 16;
  const uint32_t table_stride = uint32_t(moved.table_stride), out_stride = uint32_t(moved.out_stride);
  char* out = output(launch, moved, first, 0) + (place & (chunks - 1)) * 16;
  if (warp < columns) {
    const bool found = find_column(launch, records[warp], shared, first, first + live, tile.ids[warp]);
    tile.found[warp] = found;
    if (!found) run_positions(launch, records[warp], first, first + live);  // which reports bad ids too
  }
  __syncthreads();
  if (column >= columns || !tile.found[column]) return;
  const uint32_t* ids = tile.ids[column];
  switch (chunks) {
    case 1: return move_column<1>(table, table_stride, out, out_stride, ids, row, live);
    case 2: return move_column<2>(table, table_stride, out, out_stride, ids, row, live);
    default: return move_column<4>(table, table_stride, out, out_stride, ids, row, live);
  }
}

}  // namespace fxopt::cuda
