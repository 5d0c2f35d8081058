// fxopt::columns on CUDA: one launch for all columns of a call. A plain C interface, torch is in torch.cpp.
#include "host.h"
#include "pool.cuh"

namespace fxopt::cuda {

// One unit's rows or positions.
template <class L>
FXOPT_DEVICE void run_item(const L& launch, int item, char* shared) {
  int s = 0;
  while (s + 1 < launch.head.n_segments && item >= launch.head.segments[s + 1].first_item) s++;
  const Segment& segment = launch.head.segments[s];
  const unsigned k = unsigned(item - segment.first_item), part = k / unsigned(segment.units);
  int at = segment.first_unit + int(k - part * unsigned(segment.units));
  while (at >= 0) {  // neighbouring warps take neighbouring columns of the same rows
    const Record& record = launch.head.records[at];
    const char* edges = stage_edges(launch, record, shared);
    int64_t first = int64_t(part) * segment.span, last = segment.positions;
    if (segment.positions == 0) {  // bags: a few rows an item
      const int64_t per_item = 32 / segment.span, row = part * per_item;
      if (record.kind >= kBags) {
        run_bags(launch, record, row, segment.rows, segment.span);
        first = last = 0;
      } else {
        first = row * record.lanes;
        last = (row + per_item < segment.rows ? row + per_item : segment.rows) * record.lanes;
      }
    } else if (first + segment.span < last) {
      last = first + segment.span;
    }
    for (int64_t p = first; p < last; p += 32) run_positions(launch, record, edges, p, last);
    at = record.next;
    __syncwarp();  // the next of the slot adds to what others of the warp wrote
  }
}

template <int WORDS>
__global__ void __launch_bounds__(kWarps * 32, 4) columns_kernel(const __grid_constant__ Launch<WORDS> launch) {
  __shared__ __align__(16) char edges[kWarps][kEdgeBytes];
  const int warp = threadIdx.x >> 5;
  for (int item = blockIdx.x * kWarps + warp; item < launch.head.items; item += gridDim.x * kWarps) run_item(launch, item, edges[warp]);
}

const void* kernel() { return reinterpret_cast<const void*>(&columns_kernel<kManyWords>); }

}  // namespace fxopt::cuda
