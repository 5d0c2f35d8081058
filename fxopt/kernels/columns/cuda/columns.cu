// fxopt::columns on CUDA: one launch for all columns of a call. A plain C interface; torch is in torch.cpp.
#include "backward.h"
#include "backward.cuh"
#include "host.h"
#include "offsets.cuh"
#include "pool.cuh"
#include "short_bags.cuh"
#include "tiles.cuh"

namespace fxopt::cuda {

// One record over an item's share: rows of bags, or positions. BAGS: it may be of bags.
template <bool BAGS>
FXOPT_DEVICE void run_record(const Launch& launch, const Segment& segment, const Record& record, unsigned part, float* shared) {
  int64_t first = int64_t(part) * segment.span, last = segment.positions;
  if (segment.positions == 0) {
    const int64_t per_item = segment.bags, row = part / unsigned(segment.parts) * per_item;
    if (BAGS && record.kind >= kBags) {
      if constexpr (kShortBags)
        if (segment.bags * segment.span > 32) return run_short_bags(launch, record, row, segment.rows);
      const auto number = int16_t(part % unsigned(segment.parts)), parts = int16_t(segment.parts);
      float* found = segment.parts > 1 ? parts_of(segment, &record - launch.records - segment.first_unit, row) + number * segment.part_stride : nullptr;
      return run_bags(launch, record, row, segment.rows, segment.span, {number, parts, segment.span, found}, shared);
    }
    first = row * record.lanes;
    last = (row + per_item < segment.rows ? row + per_item : segment.rows) * record.lanes;
  } else if (first + segment.span < last) {
    last = first + segment.span;
  }
  const uint32_t end = uint32_t(last);
  for (uint32_t at = uint32_t(first); at < end;) {
    if (record.way != kAnyWay) at = run_rows(launch, record, shared, at, end);
    if (at >= end) break;
    const uint32_t some = record.way == kAnyWay || end - at < 32 * kPerThread ? end : at + 32 * kPerThread;
    run_positions(launch, record, at, some);  // which reports bad ids too
    at = some;
  }
}

struct UnitPart {
  unsigned unit, part;
};

// Neighbouring items are neighbouring units over the same rows, whose outputs are side by side. Of bags of wide rows they
// are neighbouring bags of one unit, so that L2 serves the hot rows of one table at a time: H200, MICRO'24, 419 us for
// uniform ids and 223 for Zipf's, 449 and 257 the other way.
FXOPT_DEVICE UnitPart place_of(const Segment& segment, unsigned k) {
  if (segment.positions == 0 && segment.span >= 16) {
    const unsigned bags = unsigned(segment.bags), of_unit = unsigned((segment.rows + bags - 1) / bags) * unsigned(segment.parts);
    return {k / of_unit, k % of_unit};
  }
  const unsigned part = k / unsigned(segment.units);
  return {k - part * unsigned(segment.units), part};
}

template <bool BAGS>
FXOPT_DEVICE void run_item(const Launch& launch, int item, float* shared) {
  const Segment& segment = segment_of(launch, item);
  const UnitPart place = place_of(segment, unsigned(item - segment.first_item));
  const unsigned part = place.part;
  int at = segment.first_unit + int(place.unit);
  do {
    const Record& record = launch.records[at];
    run_record<BAGS>(launch, segment, record, part, shared);
    at = record.next;
    __syncwarp();  // the next of the slot adds to what others of the warp wrote
  } while (at >= 0);
}

// A warp's part of a bag that its block takes: the items of a block's warps are neighbours, and the first ones of a launch.
FXOPT_DEVICE void run_in_block(const Launch& launch, int item, float* shared) {
  const Segment& segment = segment_of(launch, item);
  const unsigned bag = unsigned(item - segment.first_item) / kWarps, rows = unsigned(segment.rows), unit = bag / rows;
  const Record& record = launch.records[segment.first_unit + unit];
  const int warp = threadIdx.x >> 5;
  const int64_t row = bag - unit * rows;
  run_any_bag(launch, record, row, rows, {int16_t(warp), kWarps, kGrain, shared});
  __syncthreads();
  join_in_block(launch, record, shared - warp * kShared, row);
  __syncthreads();  // the next bag's parts go where these were
}

static_assert(kShared >= kEdges + 4 * kGroups);

// Kernels here do not let the next one start: its blocks would take the places of theirs.

// Where there are tiles, blocks of items and of tiles come in turn, so that bags, which come first, do not hold every slot.
__global__ void __launch_bounds__(kWarps * 32, kBlocks) columns_kernel(const __grid_constant__ Launch launch) {
  wait_for_stream();
  __shared__ __align__(16) float shared[kWarps][kShared];
  __shared__ Tile tile;
  const int warp = threadIdx.x >> 5, block = int(blockIdx.x), item_blocks = int(gridDim.x) - launch.tiles, pairs = item_blocks < launch.tiles ? item_blocks : launch.tiles;
  const bool in_turn = block < 2 * pairs;
  const int number = in_turn ? block / 2 : block - pairs;
  if (in_turn ? block % 2 == 1 : launch.tiles > pairs) return run_tile(launch, launch.items + number, shared[warp], tile);
  for (int item = number * kWarps + warp; item < launch.items; item += item_blocks * kWarps) run_item<true>(launch, item, shared[warp]);
}

// The same where all bags are those that blocks take. (Among the other bags' code there are no registers for that.)
__global__ void __launch_bounds__(kWarps * 32, kBlocks) block_columns_kernel(const __grid_constant__ Launch launch) {
  wait_for_stream();
  __shared__ __align__(16) float shared[kWarps][kShared];
  const int warp = threadIdx.x >> 5;
  int item = int(blockIdx.x) * kWarps + warp;
  for (; item < launch.in_blocks; item += int(gridDim.x) * kWarps) run_in_block(launch, item, shared[warp]);
  for (; item < launch.items; item += int(gridDim.x) * kWarps) run_item<false>(launch, item, shared[warp]);
}

// After columns_kernel, where it cut bags: a warp a bag.
__global__ void __launch_bounds__(kWarps * 32) joins_of_bags_kernel(const __grid_constant__ Launch launch) {
  wait_for_stream();
  const int64_t step = int64_t(gridDim.x) * kWarps;
  for (int64_t bag = int64_t(blockIdx.x) * kWarps + (threadIdx.x >> 5);; bag += step) {
    int64_t left = bag;
    int s = 0;
    for (; s < launch.n_segments; s++) {
      const Segment& segment = launch.segments[s];
      const int64_t bags = segment.part_stride > 0 ? segment.rows * segment.units : 0;
      if (left < bags) break;
      left -= bags;
    }
    if (s == launch.n_segments) return;
    const Segment& segment = launch.segments[s];
    join_bag(launch, segment, left / segment.rows, left % segment.rows);
  }
}

}  // namespace fxopt::cuda

// The entries of a backward, see backward.h. False: `text` (256 bytes) says what is wrong.
FXOPT_EXPORT bool fxopt_cuda_entries(const fxopt::Request* request, const fxopt::Array* grads, void* stream, int device, char* text) {
  return fxopt::done(text, [&] { fxopt::cuda::entries(*request, grads, static_cast<cudaStream_t>(stream), device); });
}

// Adds sorted entries to gradients that are zero.
FXOPT_EXPORT bool fxopt_cuda_sums(const fxopt::cuda::Sums* sums, void* stream, char* text) {
  using namespace fxopt::cuda;
  return fxopt::done(text, [&] {
    const dim3 blocks(unsigned((((sums->n + kChunk - 1) / kChunk << sums->group_log2) + 255) / 256));
    check_launched(fxopt::launch_with(nullptr, sums_kernel, blocks, 256, 0, stream, *sums));
    check_launched(fxopt::launch_with(nullptr, joins_kernel, blocks, 256, 0, stream, *sums));
  });
}

// Bags from their lengths. False: `text` (256 bytes) says what is wrong.
FXOPT_EXPORT bool fxopt_cuda_offsets(const fxopt::cuda::Lengths* lengths, void* stream, int device, char* text) {
  return fxopt::done(text, [&] { fxopt::cuda::offsets(*lengths, static_cast<cudaStream_t>(stream), fxopt::cuda::device_of(device)); });
}
