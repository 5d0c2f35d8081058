// softmax(scale q k^T + mask) v of many short sequences: a few neighbouring threads take a query, and the keys and values of
// a block's heads lie in shared memory. Where there are few queries, more threads divide the keys of one. The softmax is that of FlashAttention (Dao et al., arXiv:2205.14135): what is summed
// so far is scaled down where a larger score comes.
#include "../../floats.cuh"
#include "../../grid.cuh"

namespace fxopt::heads {

constexpr int kThreads = 128, kFactors = 4;
constexpr int kChannels = 8;   // of a query that a thread holds
constexpr int kTogether = 4;   // keys whose scores a thread has on their way
constexpr int kShares = 4;     // threads that divide a query's keys, of fewer queries than keep a GPU busy
constexpr int64_t kBusy = 1 << 16;
constexpr int kRoom = 9600;    // floats of dynamic shared memory: with what else is there, what every kernel may have

enum Masking : int32_t { kNoMask, kFillSet, kFillUnset, kAdded, kCausal };  // as plan.py numbers them

// A view [factors, positions, channels], of a mask [factors, queries, keys]; strides in elements.
struct View {
  const void* data;
  int64_t factors[kFactors], position, channel;
};

struct Heads {
  View query, key, value, mask, out;
  float* weights;           // the softmax [factors, queries, keys], or null: nobody reads it
  int32_t sizes[kFactors];  // of the factors, the last one fastest: their product counts the heads
  int32_t heads, queries, keys, channels, of_values;
  int32_t block_heads, block_queries, parts, tile;  // parts: blocks for the queries of a head; tile: keys in shared memory
  int32_t masking, safe;
  float fill, scale;
};
static_assert(sizeof(Heads) == 5 * 56 + 8 + 72);

// Where a head begins in each operand. Divisions: a few threads of a block find it for all.
struct Place {
  int64_t query, key, value, mask, out;

  __device__ void find(const Heads& h, int head) {
    query = key = value = mask = out = 0;
#pragma unroll
    for (int f = kFactors - 1; f >= 0; f--) {
      const int rest = head / h.sizes[f], at = head - rest * h.sizes[f];
      query += at * h.query.factors[f];
      key += at * h.key.factors[f];
      value += at * h.value.factors[f];
      mask += at * h.mask.factors[f];
      out += at * h.out.factors[f];
      head = rest;
    }
  }
};

// Floats from a row in shared memory to the next: threads that read the same channel of neighbouring rows use other banks.
__host__ __device__ constexpr int row_of(int width) { return width + 4; }

// Keys or values [first, first + live) of the block's heads, zeros behind the last channel and up to kTogether keys at a
// time; `begins`: where the heads do.
template <int WIDTH>
__device__ __forceinline__ void fill(const Heads& h, const View& from, int channels, const Place* places, int64_t Place::*begin, int heads, int first,
                                     int live, float* to) {
  const int rows = (live + kTogether - 1) / kTogether * kTogether, channel = int(threadIdx.x) % WIDTH;
  int head = 0, key = int(threadIdx.x) / WIDTH;
#pragma unroll 4
  for (int row = key; row < heads * rows; row += kThreads / WIDTH, key += kThreads / WIDTH) {
    for (; key >= rows; head++) key -= rows;
    const bool real = channel < channels && key < live;  // loads that ask first would wait for each other
    const float x = load<Float>(from.data, places[head].*begin + (real ? (first + key) * from.position + channel * from.channel : 0));
    to[(head * h.tile + key) * row_of(WIDTH) + channel] = real ? x : 0.0f;
  }
}

__device__ __forceinline__ float masked(const Heads& h, int64_t begin, int query, int key, float score) {
  if (h.masking == kNoMask) return score;
  if (h.masking == kCausal) return key > query ? h.fill : score;
  const int64_t at = begin + query * h.mask.position + key * h.mask.channel;
  if (h.masking == kAdded) return score + load<Float>(h.mask.data, at);
  const bool set = __ldg(static_cast<const unsigned char*>(h.mask.data) + at);
  return set == (h.masking == kFillSet) ? h.fill : score;
}

// The channel that a thread has in place c. Neighbours' chunks of four lie side by side.
template <int LANES>
__device__ __forceinline__ int channel_of(int lane, int c) { return c / 4 * LANES * 4 + lane * 4 + c % 4; }

// A thread's channels of a row in shared memory.
template <int LANES>
__device__ __forceinline__ void load_channels(const float* row, int lane, float (&x)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; c += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + channel_of<LANES>(lane, c));
    x[c] = four.x, x[c + 1] = four.y, x[c + 2] = four.z, x[c + 3] = four.w;
  }
}

// What a thread has of its query: its channels, and of the softmax the largest score, the sum, and the mixture of values.
struct Mixed {
  float query[kChannels], values[kChannels] = {}, peak = -INFINITY, sum = 0;

  // Adds kTogether keys, whose scores are -inf where there are none.
  template <int LANES>
  __device__ __forceinline__ void add(const float (&score)[kTogether], const float* rows, int lane) {
    const float before = peak;
#pragma unroll
    for (int u = 0; u < kTogether; u++) peak = fmaxf(peak, score[u]);
    const float base = peak == -INFINITY ? 0.0f : peak, down = expf(before - base);
    sum *= down;
#pragma unroll
    for (int c = 0; c < kChannels; c++) values[c] *= down;
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const float weight = expf(score[u] - base);
      sum += weight;
      float value[kChannels];
      load_channels<LANES>(rows + u * row_of(LANES * kChannels), lane, value);
#pragma unroll
      for (int c = 0; c < kChannels; c++) values[c] = fmaf(weight, value[c], values[c]);
    }
  }

  // Adds what the thread at distance `width` has of other keys.
  __device__ __forceinline__ void join(int width) {
    const float other = __shfl_xor_sync(kAll, peak, width), highest = fmaxf(peak, other), base = highest == -INFINITY ? 0.0f : highest;
    const float down = expf(peak - base), others_down = expf(other - base);
    sum = sum * down + __shfl_xor_sync(kAll, sum, width) * others_down;
#pragma unroll
    for (int c = 0; c < kChannels; c++) values[c] = values[c] * down + __shfl_xor_sync(kAll, values[c], width) * others_down;
    peak = highest;
  }
};

// Of kTogether keys from `key` on, whose rows are in shared memory; -inf from `end` on.
template <int LANES>
__device__ __forceinline__ void score_keys(const Heads& h, const float (&by)[kChannels], const float* rows, int lane, int64_t mask, int query, int key,
                                           int end, float (&score)[kTogether]) {
#pragma unroll
  for (int u = 0; u < kTogether; u++) {
    float channels[kChannels];
    load_channels<LANES>(rows + u * row_of(LANES * kChannels), lane, channels);
    score[u] = 0;
#pragma unroll
    for (int c = 0; c < kChannels; c++) score[u] = fmaf(by[c], channels[c], score[u]);
  }
#pragma unroll
  for (int width = LANES / 2; width >= 1; width /= 2)
#pragma unroll
    for (int u = 0; u < kTogether; u++) score[u] += __shfl_xor_sync(kAll, score[u], width);
#pragma unroll
  for (int u = 0; u < kTogether; u++) score[u] = key + u < end ? masked(h, mask, query, key + u, score[u]) : -INFINITY;
}

// What the weights of a query need once its sum is known.
template <int LANES>
struct Asked {
  float query[kThreads / LANES][LANES * kChannels], base[kThreads / LANES], by[kThreads / LANES];
};

// The weights of one query and the keys [first, first + live): a warp's threads take neighbouring keys.
template <int LANES>
__device__ __forceinline__ void write_weights(const Heads& h, const Asked<LANES>& asked, int slot, const float* keys, int64_t mask, int query, int first,
                                              int live, float* weights) {
  for (int key = int(threadIdx.x) % 32; key < live; key += 32) {
    const float* row = keys + key * row_of(LANES * kChannels);
    float score = 0;
#pragma unroll
    for (int c = 0; c < LANES * kChannels; c += 4) {
      const float4 one = *reinterpret_cast<const float4*>(row + c), by = *reinterpret_cast<const float4*>(asked.query[slot] + c);
      score = fmaf(one.x, by.x, fmaf(one.y, by.y, fmaf(one.z, by.z, fmaf(one.w, by.w, score))));
    }
    weights[first + key] = expf(masked(h, mask, query, first + key, score) - asked.base[slot]) * asked.by[slot];
  }
}

// LANES threads share a query's channels, and SHARES of these its keys.
template <int LANES, int SHARES>
__global__ void __launch_bounds__(kThreads, 4) heads_kernel(const __grid_constant__ Heads h) {
  wait_for_stream();
  let_next_start();
  constexpr int kWidth = LANES * kChannels, kRow = row_of(kWidth);
  __shared__ Place places[kThreads];
  __shared__ __align__(16) Asked<LANES> all;
  float* const keys = reinterpret_cast<float*>(dynamic_shared());
  float* const values = keys + h.block_heads * h.tile * kRow;
  const int thread = int(threadIdx.x), slot = thread / (LANES * SHARES), lane = thread % LANES;
  const int own = thread / LANES % SHARES * kTogether;
  const int group = int(blockIdx.x) / h.parts, part = int(blockIdx.x) - group * h.parts, first_head = group * h.block_heads;
  const int heads = h.heads - first_head < h.block_heads ? h.heads - first_head : h.block_heads;
  const int wanted = slot / h.block_queries, begin = part * h.block_queries, asked = begin + slot - wanted * h.block_queries;
  const bool real = wanted < heads && asked < h.queries;  // the other threads compute along, for nothing
  const int head = real ? wanted : 0, query = real ? asked : 0;
  if (thread < heads) places[thread].find(h, first_head + thread);
  __syncthreads();
  const Place& place = places[head];
  Mixed mixed;
#pragma unroll
  for (int c = 0; c < kChannels; c++) {
    const int channel = channel_of<LANES>(lane, c);
    const float x = load<Float>(h.query.data, place.query + query * h.query.position + (channel < h.channels ? channel : 0) * h.query.channel);
    mixed.query[c] = channel < h.channels ? x * h.scale : 0.0f;
  }
  const int row = head * h.tile * kRow;
  for (int first = 0; first < h.keys; first += h.tile) {
    const int live = h.keys - first < h.tile ? h.keys - first : h.tile;
    __syncthreads();  // nobody reads the last tile any more
    fill<kWidth>(h, h.key, h.channels, places, &Place::key, heads, first, live, keys);
    fill<kWidth>(h, h.value, h.of_values, places, &Place::value, heads, first, live, values);
    __syncthreads();
    for (int k = own; k < live + own; k += SHARES * kTogether) {
      const int at = row + (k < live ? k : 0) * kRow;
      float score[kTogether];
      score_keys<LANES>(h, mixed.query, keys + at, lane, place.mask, query, first + k, first + live, score);
      if (k < live) mixed.add<LANES>(score, values + at, lane);
    }
  }
#pragma unroll
  for (int width = LANES; width < LANES * SHARES; width *= 2) mixed.join(width);
  if (h.weights) {
    if (own == 0) {
#pragma unroll
      for (int c = 0; c < kChannels; c++) all.query[slot][channel_of<LANES>(lane, c)] = mixed.query[c];
      all.base[slot] = mixed.peak == -INFINITY ? 0.0f : mixed.peak;
      all.by[slot] = h.safe && mixed.sum == 0 ? 0.0f : 1.0f / mixed.sum;
    }
    for (int first = 0; first < h.keys; first += h.tile) {
      const int live = h.keys - first < h.tile ? h.keys - first : h.tile;
      __syncthreads();
      if (h.tile < h.keys) fill<kWidth>(h, h.key, h.channels, places, &Place::key, heads, first, live, keys);
      __syncthreads();
      for (int other = thread / 32; other < heads * h.block_queries; other += kThreads / 32) {
        const int of = other / h.block_queries, at = begin + other - of * h.block_queries;
        if (at >= h.queries) continue;
        float* const weights = h.weights + (int64_t(first_head + of) * h.queries + at) * h.keys;
        write_weights<LANES>(h, all, other, keys + of * h.tile * kRow, places[of].mask, at, first, live, weights);
      }
    }
  }
  if (!real || own) return;
  float* out = static_cast<float*>(const_cast<void*>(h.out.data)) + place.out + query * h.out.position;
#pragma unroll
  for (int c = 0; c < kChannels; c++) {
    const int channel = channel_of<LANES>(lane, c);
    if (channel < h.of_values) out[channel * h.out.channel] = h.safe && mixed.sum == 0 ? 0.0f : mixed.values[c] / mixed.sum;
  }
}

}  // namespace fxopt::heads

// Of floats; how the work is divided is found here. nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_heads(const fxopt::heads::Heads* given, int, void* stream) {
  using namespace fxopt::heads;
  Heads h = *given;
  const int widest = h.channels > h.of_values ? h.channels : h.of_values;
  int lanes = 1;
  while (lanes * kChannels < widest) lanes *= 2;
  auto least = [](int a, int b) { return a < b ? a : b; };
  const bool shared = h.keys > kTogether && int64_t(h.heads) * h.queries * lanes < kBusy;
  const int slots = kThreads / lanes / (shared ? kShares : 1), row = row_of(lanes * kChannels), rows = kRoom / (2 * row);  // of keys, as many of values
  const int keys = (h.keys + kTogether - 1) / kTogether * kTogether;
  h.block_queries = least(h.queries, slots);
  h.parts = (h.queries + h.block_queries - 1) / h.block_queries;
  h.block_heads = keys > rows ? 1 : least(slots / h.block_queries, rows / keys);
  h.tile = least(keys, rows / h.block_heads / kTogether * kTogether);
  const auto run = [&](auto* kernel, auto* sharing) {
    const dim3 blocks(unsigned((h.heads + h.block_heads - 1) / h.block_heads * h.parts));
    return fxopt::launch_shared(shared ? sharing : kernel, blocks, kThreads, h.block_heads * h.tile * 2 * row * 4, stream, h);
  };
  if (lanes == 1) return run(heads_kernel<1, 1>, heads_kernel<1, kShares>);
  if (lanes == 2) return run(heads_kernel<2, 1>, heads_kernel<2, kShares>);
  if (lanes == 4) return run(heads_kernel<4, 1>, heads_kernel<4, kShares>);
  return run(heads_kernel<8, 1>, heads_kernel<8, kShares>);
}
