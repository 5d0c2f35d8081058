// A call's inputs into the memory that a captured graph reads: one launch for all of them, each padded to its capacity.
// Tensors on the host are packed into pinned memory and go over in one copy. This first launch also says where the outputs
// go, and the last launch of the graph copies them there. No torch header.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "../abi.h"
#include "../early.cuh"
#include "../refused.h"
#include "slots.h"

namespace fxopt::stage {

constexpr int kThreads = 256, kItemBytes = 4096;  // bytes of one warp's item
constexpr int kWords = 4080;                      // launch parameters end at 32,764 bytes
constexpr int kFewWords = 128;                    // the host copies them at each launch
constexpr int kMostBlocks = 64;                   // of one output

template <int N>
struct Launch {
  const Slot* slots;
  const Item* items;
  int32_t n_items, n_targets;
  Target* targets;
  int64_t* counts;
  int32_t n_inputs, unused;
  int64_t words[N];  // of the inputs, from the front, and of the targets, up to the end
};
static_assert(sizeof(Launch<kWords>) <= 32764);

// Bytes [begin, end) of a slot, element by element of type T, which divides its rows.
template <class T>
__device__ __forceinline__ void move(const Slot& slot, const char* from, int64_t rows, int64_t stride, int64_t count, int64_t begin, int64_t end) {
  const uint32_t per_row = uint32_t(slot.row_bytes / int64_t(sizeof(T))), last = uint32_t(end / int64_t(sizeof(T)));
  const bool repeats = slot.fill == kRepeat;
#pragma unroll 4
  for (uint32_t k = uint32_t(begin / int64_t(sizeof(T))) + (threadIdx.x & 31); k < last; k += 32) {
    const uint32_t row = per_row == 1 ? k : k / per_row, at = k - row * per_row;
    const bool real = int64_t(row) < rows;
    T value = static_cast<T>(count);
    if (real || repeats) value = __ldg(reinterpret_cast<const T*>(from + (real ? int64_t(row) : rows - 1) * stride + at * sizeof(T)));
    reinterpret_cast<T*>(slot.to)[k] = value;
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ Launch<N> launch) {
  const int number = int(blockIdx.x) * (kThreads / 32) + int(threadIdx.x >> 5);
  if (number >= launch.n_items) {
    const int64_t* words = launch.words + N - 2 * launch.n_targets;
    auto* to = reinterpret_cast<int64_t*>(launch.targets);
    if (number > launch.n_items) return;
    for (int k = int(threadIdx.x & 31); k < 2 * launch.n_targets; k += 32) to[k] = words[k];
    for (int k = int(threadIdx.x & 31); k < launch.n_inputs; k += 32) launch.counts[k] = shape_of(launch.words[2 * k + 1]).rows;
    return;
  }
  const Item item = launch.items[number];
  const Slot slot = launch.slots[item.slot];
  const char* from = reinterpret_cast<const char*>(launch.words[2 * slot.input]);
  const Shape shape = shape_of(launch.words[2 * slot.input + 1]);
  const int64_t rows = shape.rows, stride = shape.stride, bytes = slot.row_bytes * slot.capacity, begin = int64_t(item.part) * kItemBytes;
  const int64_t end = begin + kItemBytes < bytes ? begin + kItemBytes : bytes;
  const int64_t count = slot.fill < 0 ? -1 : shape_of(launch.words[2 * slot.fill + 1]).rows;
  const auto address = reinterpret_cast<uint64_t>(from);
  if (stride == slot.row_bytes && end <= rows * stride && (address | uint64_t(end)) % 16 == 0) {  // side by side, nothing to fill
    const uint4* data = reinterpret_cast<const uint4*>(from);
#pragma unroll 4
    for (int64_t k = begin / 16 + (threadIdx.x & 31); k < end / 16; k += 32) reinterpret_cast<uint4*>(slot.to)[k] = __ldg(data + k);
    return;
  }
  const uint64_t bits = address | uint64_t(stride) | uint64_t(slot.row_bytes);
  if (bits % 8 == 0) move<unsigned long long>(slot, from, rows, stride, count, begin, end);
  else if (bits % 4 == 0) move<unsigned int>(slot, from, rows, stride, count, begin, end);
  else move<unsigned char>(slot, from, rows, stride, count, begin, end);
}

struct Outputs {
  const char* from[kMostOutputs];
  const Target* targets;  // behind the one of the rows
};

template <class T>
__device__ __forceinline__ void copy(const char* from, char* to, int64_t begin, int64_t bytes) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x, first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 4
  for (int64_t k = begin / int64_t(sizeof(T)) + first; k < bytes / int64_t(sizeof(T)); k += step)
    reinterpret_cast<T*>(to)[k] = reinterpret_cast<const T*>(from)[k];
}

__global__ void __launch_bounds__(kThreads) deliver_kernel(const __grid_constant__ Outputs outputs) {
  const char* from = outputs.from[blockIdx.y];
  const Target target = outputs.targets[blockIdx.y];
  char* to = reinterpret_cast<char*>(target.to);
  const int64_t whole = (reinterpret_cast<uint64_t>(from) | uint64_t(target.to)) % 16 ? 0 : target.bytes / 16 * 16;
  copy<uint4>(from, to, 0, whole);
  copy<unsigned char>(from, to, whole, target.bytes);
}

static void check(const char* wrong) {
  if (wrong) refused("fxopt.stage: %s", wrong);
}

template <int N>
static void launch(const Stage& stage, const int64_t* words, const Target* targets, cudaStream_t stream) {
  const int n_targets = 1 + stage.n_outputs;
  if ((stage.n_inputs + n_targets) * 2 > N) refused("fxopt.stage: more inputs and outputs than a launch carries");
  thread_local Launch<N> parameters;
  parameters.slots = stage.slots;
  parameters.items = stage.items;
  parameters.n_items = stage.n_items;
  parameters.n_targets = n_targets;
  parameters.targets = stage.targets;
  parameters.counts = stage.counts;
  parameters.n_inputs = stage.n_inputs;
  memcpy(parameters.words, words, size_t(stage.n_inputs) * 16);
  memcpy(parameters.words + N - 2 * n_targets, targets, size_t(n_targets) * 16);
  const dim3 blocks(unsigned((stage.n_items + 1 + kThreads / 32 - 1) / (kThreads / 32)));
  check(launch_with(nullptr, stage_kernel<N>, blocks, kThreads, 0, stream, parameters));
}

// The same for a tensor on the host, into pinned memory.
static void pack(const Slot& slot, const int64_t* words) {
  const char* from = reinterpret_cast<const char*>(words[2 * slot.input]);
  const Shape shape = shape_of(words[2 * slot.input + 1]);
  if (shape.stride == slot.row_bytes) memcpy(slot.to, from, size_t(shape.rows * slot.row_bytes));
  else for (int64_t row = 0; row < shape.rows; row++) memcpy(slot.to + row * slot.row_bytes, from + row * shape.stride, size_t(slot.row_bytes));
  for (int64_t row = shape.rows; row < slot.capacity; row++) {
    char* to = slot.to + row * slot.row_bytes;
    const int64_t count = slot.fill < 0 ? -1 : shape_of(words[2 * slot.fill + 1]).rows;
    if (slot.fill == kRepeat) memcpy(to, to - slot.row_bytes, size_t(slot.row_bytes));
    else if (slot.fill < 0) memset(to, 0xff, size_t(slot.row_bytes));
    else memcpy(to, &count, size_t(slot.row_bytes));
  }
}

}  // namespace fxopt::stage

// `words`: an address and a shape per input. `targets`: of the rows, and of each output. False: `text` (256 bytes) says
// what is wrong.
FXOPT_EXPORT bool fxopt_stage(const fxopt::stage::Stage* stage, const int64_t* words, const fxopt::stage::Target* targets, void* stream, char* text) {
  using namespace fxopt::stage;
  return fxopt::done(text, [&] {
    for (int k = 0; k < stage->n_packed; k++) pack(stage->packed[k], words);
    const auto queue = static_cast<cudaStream_t>(stream);
    const size_t bytes = size_t(stage->packed_bytes);
    const cudaError_t error = bytes ? cudaMemcpyAsync(stage->device, stage->pinned, bytes, cudaMemcpyHostToDevice, queue) : cudaSuccess;
    check(error == cudaSuccess ? nullptr : cudaGetErrorString(error));
    ((stage->n_inputs + stage->n_outputs + 1) * 2 > kFewWords ? launch<kWords> : launch<kFewWords>)(*stage, words, targets, queue);
  });
}

// The launch that copies outputs, which lie at `from` and have `most` bytes at most, to the targets of a later call.
FXOPT_EXPORT bool fxopt_deliver(const fxopt::stage::Stage* stage, const void* const* from, int64_t most, void* stream, char* text) {
  using namespace fxopt::stage;
  return fxopt::done(text, [&] {
    if (stage->n_outputs > kMostOutputs) fxopt::refused("fxopt.stage: more outputs than a launch carries");
    Outputs outputs{};
    for (int k = 0; k < stage->n_outputs; k++) outputs.from[k] = static_cast<const char*>(from[k]);
    outputs.targets = stage->targets + 1;
    const int64_t blocks = (most + 64 * kThreads - 1) / (64 * kThreads);
    const dim3 grid(unsigned(blocks < 1 ? 1 : blocks > kMostBlocks ? kMostBlocks : blocks), unsigned(stage->n_outputs));
    check(fxopt::launch_with(nullptr, deliver_kernel, grid, kThreads, 0, stream, outputs));
  });
}
