// What some lanes of a warp do with a tile of one head: queries by keys, all of it in shared memory. As in a GEMM, a thread has
// several queries and several keys, so that what it reads serves several products.
#pragma once
#include "../../columns/cuda/async.cuh"
#include "../../floats.cuh"

namespace fxopt::heads {

constexpr int kFactors = 4;

enum Vectors : int32_t { kOfQueries = 1, kOfKeys = 2, kOfValues = 4, kOfResults = 8 };  // which four floats are read or written at once
enum Masking : int32_t { kNoMask, kFillSet, kFillUnset, kAdded, kCausal };  // as plan.py numbers them

// A view [factors, positions, channels], of a mask [factors, queries, keys]; strides in elements.
struct View {
  const void* data;
  int64_t factors[kFactors], position, channel;
};

struct Heads {
  View query, key, value, mask, bias, out;  // bias: null where the scores are not added to before they are filled
  float* weights;           // of the values [factors, queries, keys], or null: nobody reads them
  int32_t sizes[kFactors];  // of the factors, the last one fastest: their product counts the heads
  int32_t heads, queries, keys, channels, of_values;
  int32_t parts, shares, vectors, unused;  // parts: tiles of queries; shares: warps that divide the keys of one
  int32_t masking, safe, gated;  // gated: by silu(score) / divisor, not by a softmax
  float fill, scale, divisor;
};
static_assert(sizeof(Heads) == 6 * 56 + 8 + 80);

// Where a head begins in an operand. (Not of all operands at once: there are no registers to keep that.)
__device__ __forceinline__ int64_t begin_of(const Heads& h, const View& view, int head) {
  int64_t begin = 0;
#pragma unroll
  for (int f = kFactors - 1; f >= 0; f--) {
    const int rest = head / h.sizes[f];
    begin += (head - rest * h.sizes[f]) * view.factors[f];
    head = rest;
  }
  return begin;
}

// A tile for vectors of up to WIDTH channels, by 32 / HEADS lanes: QUERY_LANES of them side by side have QUERIES queries each,
// the others' number KEYS keys each. Rows in shared memory are padded, so that lanes read four floats at other banks.
template <int QUERIES, int QUERY_LANES, int KEYS, int HEADS, int WIDTH>
struct Shape {
  static constexpr int kQueries = QUERIES, kQueryLanes = QUERY_LANES, kKeys = KEYS, kHeads = HEADS, kWidth = WIDTH;
  static constexpr int kLanes = 32 / HEADS, kKeyLanes = kLanes / QUERY_LANES;
  static constexpr int kTileQueries = QUERIES * QUERY_LANES, kTileKeys = KEYS * kKeyLanes;
  static constexpr int kRow = WIDTH + 4, kWeightRow = kTileKeys + 4;
  static constexpr int kOwn = WIDTH > kKeyLanes ? WIDTH / kKeyLanes : 1;  // channels of a query's result that a thread has
  static constexpr int kEach = kOwn < 4 ? kOwn : 4;                       // of these, side by side
  static constexpr int kOfKeys = kTileKeys * kRow > kTileQueries * kWeightRow ? kTileKeys * kRow : kTileQueries * kWeightRow;
  static constexpr int kFloats = (kTileQueries + kTileKeys) * kRow + kOfKeys + (HEADS > 1 ? 16 : 0);  // two heads at other banks
  static_assert(WIDTH % 8 == 0 && kTileKeys >= kTileQueries);

  __device__ static int lane() { return int(threadIdx.x) % kLanes; }
  __device__ static int query(int k) { return k * kQueryLanes + lane() / kKeyLanes; }  // of the tile
  __device__ static int key(int k) { return k * kKeyLanes + lane() % kKeyLanes; }
  __device__ static int channel(int k) { return k / kEach * kEach * kKeyLanes + lane() % kKeyLanes * kEach + k % kEach; }
};

// UNIT floats at a time, from `data` on.
template <class S, int ROWS, int UNIT>
__device__ __forceinline__ void copy_rows(const float* data, const View& from, int channels, int live, float* to) {
  constexpr int kChunks = S::kWidth / UNIT;
#pragma unroll 2
  for (int k = S::lane(); k < ROWS * kChunks; k += S::kLanes) {
    const int row = k / kChunks, channel = k % kChunks * UNIT;
    const bool real = row < live && channel < channels;
    const float* const at = data + (real ? row * from.position + channel * (UNIT == 1 ? from.channel : 1) : 0);
    if constexpr (UNIT == 4) cuda::copy_async(to + row * S::kRow + channel, at, real);
    else cuda::copy_async_few<UNIT * 4>(to + row * S::kRow + channel, at, real);
  }
}

// Starts to load rows [first, first + live) of a view, zeros behind them and behind their last channel. `vector`: four floats
// at a time.
template <class S, int ROWS>
__device__ __forceinline__ void stage(const View& from, int64_t begin, int channels, int first, int live, bool vector, float* to) {
  const float* data = static_cast<const float*>(from.data) + begin + first * from.position;
  if (vector) copy_rows<S, ROWS, 4>(data, from, channels, live, to);
  else copy_rows<S, ROWS, 1>(data, from, channels, live, to);
  cuda::commit_copies();
}

template <class S>
using Scores = float[S::kQueries][S::kKeys];

// Of all queries and keys of the tile.
template <class S>
__device__ __forceinline__ void find_scores(const Heads& h, const float* queries, const float* keys, Scores<S>& score) {
#pragma unroll
  for (int q = 0; q < S::kQueries; q++)
#pragma unroll
    for (int k = 0; k < S::kKeys; k++) score[q][k] = 0;
#pragma unroll 1
  for (int c = 0; c < h.channels; c += 4) {
    float4 by[S::kQueries];
#pragma unroll
    for (int q = 0; q < S::kQueries; q++) by[q] = *reinterpret_cast<const float4*>(queries + S::query(q) * S::kRow + c);
#pragma unroll
    for (int k = 0; k < S::kKeys; k++) {
      const float4 one = *reinterpret_cast<const float4*>(keys + S::key(k) * S::kRow + c);
#pragma unroll
      for (int q = 0; q < S::kQueries; q++)
        score[q][k] = fmaf(by[q].w, one.w, fmaf(by[q].z, one.z, fmaf(by[q].y, one.y, fmaf(by[q].x, one.x, score[q][k]))));
    }
  }
#pragma unroll
  for (int q = 0; q < S::kQueries; q++)
#pragma unroll
    for (int k = 0; k < S::kKeys; k++) score[q][k] *= h.scale;
}

// A query's scores, changed by what a view has for them; `begin` is where the head begins. Its keys are less than 2^26
// elements apart, because there are not enough registers for longer strides.
template <class S, class T, class Change>
__device__ __forceinline__ void change_row(const View& view, int64_t begin, int query, int key, int live, float (&score)[S::kKeys], Change change) {
  const T* at = static_cast<const T*>(view.data) + begin + query * view.position + (key + S::key(0)) * view.channel;
#pragma unroll
  for (int k = 0; k < S::kKeys; k++, at += S::kKeyLanes * int(view.channel))
    score[k] = change(score[k], S::key(k) < live ? __ldg(at) : T());
}

// Moves the first query's scores behind those of the others, so that a loop finds each query's in the same registers.
template <class S>
__device__ __forceinline__ void turn(Scores<S>& score) {
#pragma unroll
  for (int k = 0; k < S::kKeys; k++) {
    const float first = score[0][k];
#pragma unroll
    for (int q = 1; q < S::kQueries; q++) score[q - 1][k] = score[q][k];
    score[S::kQueries - 1][k] = first;
  }
}

// Of the queries from `query` on and the `live` keys from `key` on; other keys' scores become what has no weight. mask, bias:
// where the head begins in them. One query at a time: there are not enough registers for the addresses of all.
template <class S>
__device__ __forceinline__ void mask_scores(const Heads& h, int64_t mask, int64_t bias, int query, int key, int live, Scores<S>& score) {
  if (h.masking != kNoMask) {
#pragma unroll 1
    for (int q = 0; q < S::kQueries; q++) {
      const int asked = query + S::query(q), real = asked < h.queries ? asked : h.queries - 1;
      auto add = [](float one, float added) { return one + added; };
      if (h.bias.data) change_row<S, float>(h.bias, bias, real, key, live, score[0], add);
      if (h.masking == kCausal) {
#pragma unroll
        for (int k = 0; k < S::kKeys; k++) score[0][k] = key + S::key(k) > real ? h.fill : score[0][k];
      } else if (h.masking == kAdded) {
        change_row<S, float>(h.mask, mask, real, key, live, score[0], add);
      } else {
        auto fill = [&](float one, unsigned char set) { return (set != 0) == (h.masking == kFillSet) ? h.fill : one; };
        change_row<S, unsigned char>(h.mask, mask, real, key, live, score[0], fill);
      }
      turn<S>(score);
    }
  }
  const float nothing = h.gated ? -1e30f : -INFINITY;  // silu(-inf) is NaN, as torch's is
#pragma unroll
  for (int q = 0; q < S::kQueries; q++)
#pragma unroll
    for (int k = 0; k < S::kKeys; k++) score[q][k] = S::key(k) < live ? score[q][k] : nothing;
}

// What a thread has of its queries: of each the largest score, its keys' part of the sum, and its channels of the mixture.
template <class S>
struct Mixed {
  float peak[S::kQueries], sum[S::kQueries], values[S::kQueries][S::kOwn];

  __device__ __forceinline__ Mixed() {
#pragma unroll
    for (int q = 0; q < S::kQueries; q++) {
      peak[q] = -INFINITY;
      sum[q] = 0;
#pragma unroll
      for (int c = 0; c < S::kOwn; c++) values[q][c] = 0;
    }
  }

  __device__ __forceinline__ float base(int q) const { return peak[q] == -INFINITY ? 0.0f : peak[q]; }

  // To a query's new peak.
  __device__ __forceinline__ void scale_down(int q, float highest) {
    const float before = peak[q];
    peak[q] = highest;
    const float down = expf(before - base(q));
    sum[q] *= down;
#pragma unroll
    for (int c = 0; c < S::kOwn; c++) values[q][c] *= down;
  }

  // The weights of scores, by the peaks as they are, in shared memory, a row a query.
  __device__ __forceinline__ void weigh(const Scores<S>& score, bool gated, float* weights) const {
#pragma unroll
    for (int q = 0; q < S::kQueries; q++)
#pragma unroll
      for (int k = 0; k < S::kKeys; k++) {
        const float one = score[q][k];
        weights[S::query(q) * S::kWeightRow + S::key(k)] = gated ? __fdividef(one, 1.0f + expf(-one)) : expf(one - base(q));
      }
  }

  // Counts a tile of scores of which each is a weight by itself.
  __device__ __forceinline__ void gate(const Scores<S>& score, float* weights) {
#pragma unroll
    for (int q = 0; q < S::kQueries; q++) peak[q] = 0;  // nothing is scaled down
    weigh(score, true, weights);
  }

  // Counts a tile's scores, and leaves its weights in shared memory.
  __device__ __forceinline__ void count(const Scores<S>& score, float* weights) {
#pragma unroll
    for (int q = 0; q < S::kQueries; q++) {
      float highest = peak[q];
#pragma unroll
      for (int k = 0; k < S::kKeys; k++) highest = fmaxf(highest, score[q][k]);
#pragma unroll
      for (int width = S::kKeyLanes / 2; width >= 1; width /= 2) highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, width));
      scale_down(q, highest);
    }
    weigh(score, false, weights);
#pragma unroll
    for (int q = 0; q < S::kQueries; q++)
#pragma unroll
      for (int k = 0; k < S::kKeys; k++) sum[q] += weights[S::query(q) * S::kWeightRow + S::key(k)];
  }

  // Adds `live` rows of values, and up to three of zeros, by such weights.
  __device__ __forceinline__ void add(const float* weights, const float* rows, int live) {
#pragma unroll 1
    for (int key = 0; key < live; key += 4) {
      float4 by[S::kQueries];
#pragma unroll
      for (int q = 0; q < S::kQueries; q++) by[q] = *reinterpret_cast<const float4*>(weights + S::query(q) * S::kWeightRow + key);
#pragma unroll
      for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int c = 0; c < S::kOwn; c += S::kEach) {
          const auto value = *reinterpret_cast<const Vector<float, S::kEach>*>(rows + (key + k) * S::kRow + S::channel(c) % S::kWidth);
#pragma unroll
          for (int q = 0; q < S::kQueries; q++) {
            const float weight = k == 0 ? by[q].x : k == 1 ? by[q].y : k == 2 ? by[q].z : by[q].w;
#pragma unroll
            for (int e = 0; e < S::kEach; e++) values[q][c + e] = fmaf(weight, value.value[e], values[q][c + e]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void divide_by(float divisor) {
#pragma unroll
    for (int q = 0; q < S::kQueries; q++) sum[q] = divisor;
  }

  // Of all keys that the lanes of a query have.
  __device__ __forceinline__ void sum_up() {
#pragma unroll
    for (int width = S::kKeyLanes / 2; width >= 1; width /= 2)
#pragma unroll
      for (int q = 0; q < S::kQueries; q++) sum[q] += __shfl_xor_sync(kAll, sum[q], width);
  }
};

}  // namespace fxopt::heads
