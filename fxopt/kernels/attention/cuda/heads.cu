// softmax(scale q k^T + mask) v, or silu(...) v, of many short sequences: a warp takes a tile of the queries of one head, and
// goes over its keys tile by tile. The softmax is that of FlashAttention (Dao et al., arXiv:2205.14135): what is summed so far
// is scaled down where a larger score comes. Nothing is on tensor cores, because fp32 is asked for.
#include "../../grid.cuh"
#include "tile.cuh"

namespace fxopt::heads {

constexpr int kWarps = 4;
constexpr int64_t kBusy = 512;  // warps; where there are fewer, those of a block divide the keys of one tile of queries

// What lies where in the shared memory of a warp's head.
template <class S>
struct Memory {
  float *queries, *values, *keys;  // weights take the place of the keys that they are of

  __device__ Memory(int warp, int half) {
    queries = reinterpret_cast<float*>(dynamic_shared()) + (warp * S::kHeads + half) * S::kFloats;
    values = queries + S::kTileQueries * S::kRow;
    keys = values + S::kTileKeys * S::kRow;
  }
};

// What the warps of a block have of the same queries, in their order; all of them get it.
template <class S>
__device__ __forceinline__ void join(const Memory<S>& own, Mixed<S>& mixed) {
  float *const peaks = own.keys, *const sums = peaks + S::kTileQueries;
  __syncwarp();
#pragma unroll
  for (int q = 0; q < S::kQueries; q++) {
    peaks[S::query(q)] = mixed.peak[q];
    sums[S::query(q)] = mixed.sum[q];
#pragma unroll
    for (int c = 0; c < S::kOwn; c++)
      if (S::channel(c) < S::kWidth) own.values[S::query(q) * S::kRow + S::channel(c)] = mixed.values[q][c];
  }
  __syncthreads();
  mixed = Mixed<S>();
#pragma unroll 1
  for (int warp = 0; warp < kWarps; warp++) {
    const Memory<S> other(warp, 0);
#pragma unroll
    for (int q = 0; q < S::kQueries; q++) {
      const float peak = other.keys[S::query(q)];
      mixed.scale_down(q, fmaxf(mixed.peak[q], peak));
      const float down = expf(peak - mixed.base(q));
      mixed.sum[q] = fmaf(down, other.keys[S::kTileQueries + S::query(q)], mixed.sum[q]);
#pragma unroll
      for (int c = 0; c < S::kOwn; c++) mixed.values[q][c] = fmaf(down, other.values[S::query(q) * S::kRow + S::channel(c) % S::kWidth], mixed.values[q][c]);
    }
  }
  __syncthreads();  // all have read what the weights take the place of
}

// The weights of a tile that are in shared memory, divided by their sums; neighbouring lanes write neighbouring keys.
template <class S>
__device__ __forceinline__ void write_weights(const Heads& h, const Mixed<S>& mixed, float* room, int64_t head, bool real, int query, int key, int live) {
  __syncwarp();  // all have added the values by these
#pragma unroll
  for (int q = 0; q < S::kQueries; q++) {
    const float by = h.safe && mixed.sum[q] == 0 ? 0.0f : 1.0f / mixed.sum[q];
#pragma unroll
    for (int k = 0; k < S::kKeys; k++) room[S::query(q) * S::kWeightRow + S::key(k)] *= by;
  }
  __syncwarp();
  if (!real) return;
  const int asked = h.queries - query < S::kTileQueries ? h.queries - query : S::kTileQueries;
  float* to = h.weights + (head * h.queries + query) * h.keys + key;
#pragma unroll 4
  for (int row = 0; row < asked; row++, to += h.keys)
    for (int k = S::lane(); k < live; k += S::kLanes) to[k] = room[row * S::kWeightRow + k];
}

template <class S>
__device__ __forceinline__ void write_values(const Heads& h, const Mixed<S>& mixed, int64_t begin, int query) {
#pragma unroll
  for (int q = 0; q < S::kQueries; q++) {
    if (query + S::query(q) >= h.queries) continue;
    float* out = static_cast<float*>(const_cast<void*>(h.out.data)) + begin + (query + S::query(q)) * h.out.position;
    const float sum = h.safe && mixed.sum[q] == 0 ? 1.0f : mixed.sum[q];  // of no keys, all values are zeros
#pragma unroll
    for (int c = 0; c < S::kOwn; c += S::kEach) {
      const int channel = S::channel(c);
      Vector<float, S::kEach> x;
#pragma unroll
      for (int e = 0; e < S::kEach; e++) x.value[e] = mixed.values[q][c + e] / sum;
      if (h.vectors & kOfResults) {
        if (channel < h.of_values) *reinterpret_cast<Vector<float, S::kEach>*>(out + channel) = x;
        continue;
      }
#pragma unroll
      for (int e = 0; e < S::kEach; e++)
        if (channel + e < h.of_values) out[(channel + e) * h.out.channel] = x.value[e];
    }
  }
}

template <class S>
__global__ void __launch_bounds__(kWarps * 32, S::kWidth < 64 ? 4 : 2) heads_kernel(const __grid_constant__ Heads h) {
  in_turn();
  const int warp = int(threadIdx.x) / 32, half = int(threadIdx.x) % 32 / S::kLanes, share = warp % h.shares;
  const int item = int(blockIdx.x) * (kWarps / h.shares) + warp / h.shares, group = item / h.parts;
  if (group * S::kHeads >= h.heads) return;  // the whole warp; where warps wait for others, all of the block have work
  const bool real = group * S::kHeads + half < h.heads;
  const int head = real ? group * S::kHeads + half : 0, query = (item - group * h.parts) * S::kTileQueries;
  const Memory<S> memory(warp, half);
  stage<S, S::kTileQueries>(h.query, begin_of(h, h.query, head), h.channels, query, h.queries - query, h.vectors & kOfQueries, memory.queries);
  const int64_t key = begin_of(h, h.key, head), value = begin_of(h, h.value, head);
  const int64_t mask = h.masking ? begin_of(h, h.mask, head) : 0, bias = h.bias.data ? begin_of(h, h.bias, head) : 0;
  Mixed<S> mixed;
  // `take(first, live, score)` for the tiles of keys of this warp, weights in the place of keys.
  auto for_tiles = [&](bool values, auto take) {
#pragma unroll 1
    for (int first = share * S::kTileKeys; first < h.keys; first += h.shares * S::kTileKeys) {
      const int live = h.keys - first < S::kTileKeys ? h.keys - first : S::kTileKeys;
      __syncwarp();  // nobody reads the last tile any more
      stage<S, S::kTileKeys>(h.key, key, h.channels, first, live, h.vectors & kOfKeys, memory.keys);
      if (values) stage<S, S::kTileKeys>(h.value, value, h.of_values, first, live, h.vectors & kOfValues, memory.values);
      if (values) cuda::wait_copies<1>();  // the values may come later
      else cuda::wait_copies<0>();
      __syncwarp();
      Scores<S> score;
      find_scores<S>(h, memory.queries, memory.keys, score);
      __syncwarp();
      mask_scores<S>(h, mask, bias, query, first, live, score);
      take(first, live, score);
    }
  };
  for_tiles(true, [&](int, int live, const Scores<S>& score) {
    if (h.gated) mixed.gate(score, memory.keys);
    else mixed.count(score, memory.keys);
    cuda::wait_copies<0>();
    __syncwarp();
    mixed.add(memory.keys, memory.values, live);
  });
  cuda::wait_copies<0>();  // of the queries, where all keys are the other warps'
  mixed.sum_up();
  if (h.shares > 1) join(memory, mixed);
  if (h.gated) mixed.divide_by(h.divisor);
  if (real && share == 0) write_values(h, mixed, begin_of(h, h.out, head), query);
  if (!h.weights) return;
  auto write = [&](int first, int live) { write_weights(h, mixed, memory.keys, head, real, query, first, live); };
  if (h.keys <= S::kTileKeys) return write(0, h.keys);  // they are still there
  for_tiles(false, [&](int first, int live, const Scores<S>& score) {
    mixed.weigh(score, h.gated, memory.keys);
    write(first, live);
  });
}

// Whether four floats of a view's rows can be read at once.
inline bool vector_of(const View& view, int channels) {
  int64_t bits = view.position | reinterpret_cast<int64_t>(view.data) / 4 | channels;
  for (const int64_t stride : view.factors) bits |= stride;
  return view.channel == 1 && bits % 4 == 0;
}

template <class S>
const char* run(Heads h, void* stream) {
  h.parts = (h.queries + S::kTileQueries - 1) / S::kTileQueries;
  const int64_t items = (int64_t(h.heads) + S::kHeads - 1) / S::kHeads * h.parts;
  h.shares = items < kBusy && h.keys > S::kTileKeys ? kWarps : 1;
  const dim3 blocks(unsigned(h.shares > 1 ? items : (items + kWarps - 1) / kWarps));
  return launch(heads_kernel<S>, blocks, kWarps * 32, stream, h, kWarps * S::kHeads * S::kFloats * int(sizeof(float)));
}

// For vectors of so many channels. One or two queries of 8 channels, and two heads of 64 a warp, have no kernel of their own.
template <int WIDTH>
const char* run(const Heads& h, void* stream) {
  if (h.queries <= 2) return run<Shape<1, 1, 1, 1, WIDTH < 16 ? 16 : WIDTH>>(h, stream);
  if (h.queries <= 16 && h.keys <= 16 && WIDTH < 64) return run<Shape<4, 4, 4, 2, WIDTH < 64 ? WIDTH : 8>>(h, stream);
  return run<Shape<4, 8, 8, 1, WIDTH>>(h, stream);
}

}  // namespace fxopt::heads

// Of floats; how the work is divided is found here. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_heads(const fxopt::heads::Heads* given, int, void* stream) {
  using namespace fxopt::heads;
  Heads h = *given;
  const int widest = h.channels > h.of_values ? h.channels : h.of_values;
  h.vectors = vector_of(h.query, h.channels) * kOfQueries | vector_of(h.key, h.channels) * kOfKeys;
  h.vectors |= vector_of(h.value, h.of_values) * kOfValues | vector_of(h.out, h.of_values) * kOfResults;
  if (widest <= 8) return run<8>(h, stream);
  if (widest <= 16) return run<16>(h, stream);
  if (widest <= 32) return run<32>(h, stream);
  return run<64>(h, stream);
}
