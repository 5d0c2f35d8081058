// softmax(scale q k^T + mask) v of many short sequences: a few neighbouring threads take a query, and the keys and values of
// a block's heads lie in shared memory. The softmax is that of FlashAttention (Dao et al., arXiv:2205.14135): what is summed
// so far is scaled down where a larger score comes.
#include "../../floats.cuh"
#include "../../grid.cuh"

namespace fxopt::heads {

constexpr int kThreads = 128, kFactors = 4;
constexpr int kChannels = 8;   // of a query that a thread holds
constexpr int kTogether = 4;   // keys whose scores a thread has on their way
constexpr int kRoom = 12288;   // floats: the shared memory that every kernel may have

enum Masking : int32_t { kNoMask, kFillSet, kFillUnset, kAdded, kCausal };  // as plan.py numbers them

// A view [factors, positions, channels], of a mask [factors, queries, keys]; strides in elements.
struct View {
  const void* data;
  int64_t factors[kFactors], position, channel;
};

struct Heads {
  View query, key, value, mask, out;
  int32_t sizes[kFactors];  // of the factors, the last one fastest: their product counts the heads
  int32_t heads, queries, keys, channels, of_values;
  int32_t block_heads, block_queries, parts, tile;  // parts: blocks for the queries of a head; tile: keys in shared memory
  int32_t masking, safe;
  float fill, scale;
};
static_assert(sizeof(Heads) == 5 * 56 + 72);

// Where a head begins in each operand.
struct Place {
  int64_t query = 0, key = 0, value = 0, mask = 0, out = 0;

  __device__ Place(const Heads& h, int head) {
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

// Keys or values [first, first + live) of the block's heads, zeros behind the last channel and up to kTogether keys at a
// time; `begins`: where the heads do.
template <int WIDTH>
__device__ __forceinline__ void fill(const Heads& h, const View& from, int channels, const int64_t* begins, int heads, int first, int live, float* to) {
  const int rows = (live + kTogether - 1) / kTogether * kTogether, all = heads * rows * WIDTH;
#pragma unroll 4
  for (int at = int(threadIdx.x); at < all; at += kThreads) {
    const int channel = at % WIDTH, row = at / WIDTH, head = row / rows, key = row - head * rows;
    const bool real = channel < channels && key < live;  // loads that ask first would wait for each other
    const float x = load<Float>(from.data, begins[head] + (real ? (first + key) * from.position + channel * from.channel : 0));
    to[(head * h.tile + key) * WIDTH + channel] = real ? x : 0.0f;
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
      load_channels<LANES>(rows + u * LANES * kChannels, lane, value);
#pragma unroll
      for (int c = 0; c < kChannels; c++) values[c] = fmaf(weight, value[c], values[c]);
    }
  }
};

// LANES threads share a query.
template <int LANES>
__global__ void __launch_bounds__(kThreads, 4) heads_kernel(const __grid_constant__ Heads h) {
  wait_for_stream();
  let_next_start();
  constexpr int kWidth = LANES * kChannels;
  __shared__ int64_t begins[2][kThreads];
  float* const keys = reinterpret_cast<float*>(dynamic_shared());
  float* const values = keys + h.block_heads * h.tile * kWidth;
  const int thread = int(threadIdx.x), slot = thread / LANES, lane = thread % LANES;
  const int group = int(blockIdx.x) / h.parts, part = int(blockIdx.x) - group * h.parts, first_head = group * h.block_heads;
  const int heads = h.heads - first_head < h.block_heads ? h.heads - first_head : h.block_heads;
  const int wanted = slot / h.block_queries, query = part * h.block_queries + slot - wanted * h.block_queries;
  const bool real = wanted < heads && query < h.queries;  // the other threads compute along, for nothing
  const int head = real ? wanted : 0;
  const Place place(h, first_head + head);
  if (thread < heads) {
    const Place of_keys(h, first_head + thread);
    begins[0][thread] = of_keys.key;
    begins[1][thread] = of_keys.value;
  }
  Mixed mixed;
#pragma unroll
  for (int c = 0; c < kChannels; c++) {
    const int channel = channel_of<LANES>(lane, c);
    const float x = load<Float>(h.query.data, place.query + (real ? query : 0) * h.query.position + (channel < h.channels ? channel : 0) * h.query.channel);
    mixed.query[c] = channel < h.channels ? x * h.scale : 0.0f;
  }
  for (int first = 0; first < h.keys; first += h.tile) {
    const int live = h.keys - first < h.tile ? h.keys - first : h.tile;
    __syncthreads();  // nobody reads the last tile any more
    fill<kWidth>(h, h.key, h.channels, begins[0], heads, first, live, keys);
    fill<kWidth>(h, h.value, h.of_values, begins[1], heads, first, live, values);
    __syncthreads();
    for (int k = 0; k < live; k += kTogether) {
      const int row = (head * h.tile + k) * kWidth;
      float score[kTogether] = {};
#pragma unroll
      for (int u = 0; u < kTogether; u++) {
        float key[kChannels];
        load_channels<LANES>(keys + row + u * kWidth, lane, key);
#pragma unroll
        for (int c = 0; c < kChannels; c++) score[u] = fmaf(mixed.query[c], key[c], score[u]);
      }
#pragma unroll
      for (int width = LANES / 2; width >= 1; width /= 2)
#pragma unroll
        for (int u = 0; u < kTogether; u++) score[u] += __shfl_xor_sync(kAll, score[u], width);
#pragma unroll
      for (int u = 0; u < kTogether; u++)
        score[u] = k + u < live ? masked(h, place.mask, real ? query : 0, first + k + u, score[u]) : -INFINITY;
      mixed.add<LANES>(score, values + row, lane);
    }
  }
  if (!real) return;
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
  const int slots = kThreads / lanes, rows = kRoom / (2 * lanes * kChannels);  // of keys, as many of values
  const int keys = (h.keys + kTogether - 1) / kTogether * kTogether;
  h.block_queries = least(h.queries, slots);
  h.parts = (h.queries + h.block_queries - 1) / h.block_queries;
  h.block_heads = keys > rows ? 1 : least(slots / h.block_queries, rows / keys);
  h.tile = least(keys, rows / h.block_heads / kTogether * kTogether);
  auto* kernel = lanes == 1 ? heads_kernel<1> : lanes == 2 ? heads_kernel<2> : lanes == 4 ? heads_kernel<4> : heads_kernel<8>;
  const dim3 blocks(unsigned((h.heads + h.block_heads - 1) / h.block_heads * h.parts));
  return fxopt::launch_shared(kernel, blocks, kThreads, h.block_heads * h.tile * 2 * lanes * kChannels * 4, stream, h);
}
