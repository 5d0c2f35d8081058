// Where the bags of a jagged tensor begin, from their lengths, in one launch: a block adds up what lies before its share
// by itself. Wrong lengths are reported as bad ids are, and whoever reads bags by wrong offsets stays within the ids.
#pragma once
#include "errors.cuh"

namespace fxopt::cuda {

constexpr int kScanThreads = 512, kScanEach = 8, kScanTile = kScanThreads * kScanEach;
constexpr int kMostScans = 32;  // blocks, because each reads all lengths before its own
constexpr int kMostChecked = 4;

// offsets.py writes the same struct.
struct Lengths {
  const void* lengths;  // int64 where they are `wide`, else int32
  int64_t* offsets;     // [n + 1]
  int64_t n;
  int32_t wide, exact, n_ids, unused;
  int64_t rows[kMostChecked];         // of each tensor of ids
  const int64_t* real[kMostChecked];  // on the device: how many of them are real now, null: all
  Errors* errors;                     // fxopt_cuda_offsets writes it
};

FXOPT_DEVICE int64_t length_at(const Lengths& l, int64_t k) {
  const char* from = static_cast<const char*>(l.lengths) + k * (l.wide ? 8 : 4);
  return l.wide ? int64_t(load_as<long long>(from)) : int64_t(load_as<int>(from));
}

struct Before {
  int64_t own, all;  // in front of this thread's, and of all threads together
};

// What the threads of a block have, added up in their order. All threads call it.
FXOPT_DEVICE Before before(int64_t x, int64_t* of_warps) {
  const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
  int64_t sum = x;
#pragma unroll
  for (int back = 1; back < 32; back *= 2) {
    const long long from = __shfl_sync(kAll, static_cast<long long>(sum), (lane - back) & 31);
    if (lane >= back) sum += from;
  }
  __syncthreads();  // the warps have read what was there
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  Before found{sum - x, 0};
  for (int w = 0; w < kScanThreads / 32; w++) {
    if (w < warp) found.own += of_warps[w];
    found.all += of_warps[w];
  }
  return found;
}

FXOPT_DEVICE void check_total(const Lengths& l, int64_t total) {
  for (int k = 0; k < l.n_ids; k++) {
    const int64_t rows = l.real[k] ? int64_t(__ldg(reinterpret_cast<const long long*>(l.real[k]))) : l.rows[k];
    if (l.exact ? rows != total : rows < total) return report(l.errors, {kBadTotal, 0, 0, 0, total, rows, 0});
  }
}

__global__ void __launch_bounds__(kScanThreads) offsets_kernel(const __grid_constant__ Lengths l) {
  in_turn();
  __shared__ int64_t of_warps[kScanThreads / 32];
  const int64_t tiles = (l.n + kScanTile - 1) / kScanTile, share = (tiles + gridDim.x - 1) / gridDim.x * kScanTile;
  const int64_t first = blockIdx.x * share, last = first + share < l.n ? first + share : l.n;
  if (first > l.n) return;
  int64_t sum = 0;
#pragma unroll 8
  for (int64_t k = threadIdx.x; k < first; k += kScanThreads) sum += length_at(l, k);
  sum = before(sum, of_warps).all;
  for (int64_t tile = first; tile < last; tile += kScanTile) {
    const int64_t at = tile + int64_t(threadIdx.x) * kScanEach;
    int64_t own[kScanEach], mine = 0, negative = -1;
#pragma unroll
    for (int j = 0; j < kScanEach; j++) {
      own[j] = at + j < last ? length_at(l, at + j) : 0;
      if (own[j] < 0 && negative < 0) negative = at + j;
      mine += own[j];
    }
    const unsigned wrong = __ballot_sync(kAll, negative >= 0);
    if (wrong && int(threadIdx.x & 31) == __ffs(int(wrong)) - 1) report(l.errors, {kBadLength, 0, negative, 0, length_at(l, negative), 0, 0});
    __syncwarp();
    const Before found = before(mine, of_warps);
    int64_t offset = sum + found.own;
#pragma unroll
    for (int j = 0; j < kScanEach; j++) {
      offset += own[j];
      if (at + j < last) l.offsets[at + j + 1] = offset;
    }
    sum += found.all;
  }
  if (threadIdx.x > 0) return;
  if (first == 0) l.offsets[0] = 0;
  if (last == l.n && (first < l.n || l.n == 0)) check_total(l, sum);
}

inline void offsets(Lengths lengths, cudaStream_t stream, Device& device) {
  lengths.errors = device.errors;
  const int64_t tiles = (lengths.n + kScanTile - 1) / kScanTile;
  const dim3 blocks(unsigned(tiles < 1 ? 1 : tiles > kMostScans ? kMostScans : tiles));
  check_launched(fxopt::launch(offsets_kernel, blocks, kScanThreads, stream, lengths));
}

}  // namespace fxopt::cuda
