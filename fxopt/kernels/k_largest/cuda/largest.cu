// The k largest numbers of many short lists, by ranks: a thread has a few numbers of a list, and counts which of the list are
// larger, and which equal ones are in front of them. A block has some lists in shared memory.
#include "../../floats.cuh"
#include "../../grid.cuh"

namespace fxopt::largest {

constexpr int kOwn = 4;                          // numbers of a thread: it compares each key that it reads with all of them
constexpr int kThreads = 256, kMostGroups = 64;  // of a block, and of a list: the threads that have its numbers
constexpr int kBlocks = 2;                       // of each multiprocessor, where there are lists for so many
constexpr int kClose = 8;                        // numbers that memory gives at once
constexpr unsigned kSign = 1u << 31, kNan = ~1u, kNone = 0;  // keys of NaN, and of no number

struct Largest {
  Operand x, out;            // [outer, length, inner] and [outer, k, inner]
  int64_t count;             // outer * inner lists
  int32_t length, inner, k;
  int32_t groups, bits;      // set here, as what follows: a block has 1 << bits lists, of so many groups each;
  int32_t along;             // its neighbouring lanes go along a list, not from list to list;
  int64_t x_step, out_step;  // and a thread has every groups-th number of a list: from one to its next
};
static_assert(sizeof(Largest) == 2 * 32 + 8 + 24 + 16);

using Keys = Vector<unsigned, kOwn>;

// In the order of the floats, NaN above all, as topk has it; between kNone and the largest integer.
__device__ __forceinline__ unsigned key_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return x == x ? bits & kSign ? ~bits : bits | kSign : kNan;
}

__device__ __forceinline__ float value_of(unsigned key) { return __uint_as_float(key & kSign ? key & ~kSign : ~key); }

// One more where key > own: then key + ~own carries. Two of these are three instructions, where comparisons would be six.
__device__ __forceinline__ unsigned counted(unsigned count, unsigned key, unsigned own) {
  return unsigned(((uint64_t(count) << 32) + key + ~own) >> 32);
}

// Where the numbers of a group belong in their list. keys: of the list's first group; from a group to the next it is `pitch`.
__device__ __forceinline__ void find_ranks(const Keys* keys, int pitch, int groups, int group, const Keys& own, unsigned (&ranks)[kOwn]) {
#pragma unroll 2
  for (int other = 0; other < groups; other++) {
    const Keys read = keys[other * pitch];
    const unsigned in_front = other < group;  // equal ones count there
#pragma unroll
    for (const unsigned key : read.value) {
#pragma unroll
      for (int i = 0; i < kOwn; i++) ranks[i] = counted(ranks[i], key + in_front, own.value[i]);
    }
  }
#pragma unroll
  for (int i = 1; i < kOwn; i++) {
#pragma unroll
    for (int j = 0; j < i; j++) ranks[i] += own.value[j] == own.value[i];
  }
}

__global__ void __launch_bounds__(kThreads) k_largest_kernel(const __grid_constant__ Largest p) {
  in_turn();
  __shared__ Keys keys[kThreads + kMostGroups];
  __shared__ unsigned sorted[(kThreads + kMostGroups) * kOwn];
  const unsigned thread = threadIdx.x, groups = unsigned(p.groups), lists = 1u << p.bits;
  const unsigned slow = p.along ? thread / groups : thread >> p.bits, fast = p.along ? thread - slow * groups : thread & (lists - 1);
  const int list = int(p.along ? slow : fast), group = int(p.along ? fast : slow);
  const int pitch = int(lists | 1);  // odd: lanes along a list use other banks too
  const int64_t at = (int64_t(blockIdx.x) << p.bits) + list, outer = at / p.inner, inner = at - outer * p.inner;
  const bool real = list < int(lists) && group < p.groups && at < p.count;
  const float* from = static_cast<const float*>(p.x.data) + outer * p.x.strides[0] + inner * p.x.strides[2] + group * p.x.strides[1];
  Keys own;
#pragma unroll
  for (int i = 0; i < kOwn; i++, from += p.x_step) own.value[i] = real && group + i * p.groups < p.length ? key_of(__ldg(from)) : kNone;
  if (real) keys[group * pitch + list] = own;
  __syncthreads();
  if (real) {
    unsigned ranks[kOwn] = {};
    find_ranks(keys + list, pitch, p.groups, group, own, ranks);
#pragma unroll
    for (int i = 0; i < kOwn; i++)
      if (ranks[i] < unsigned(p.k)) sorted[ranks[i] * pitch + list] = own.value[i];  // there are k keys above kNone
  }
  __syncthreads();
  float* to = static_cast<float*>(const_cast<void*>(p.out.data)) + outer * p.out.strides[0] + inner * p.out.strides[2] + group * p.out.strides[1];
  int row = group;
#pragma unroll
  for (int i = 0; i < kOwn; i++, row += p.groups, to += p.out_step)
    if (real && row < p.k) *to = value_of(sorted[row * pitch + list]);
}

// As many lists a block as its threads have numbers of, and as leave no multiprocessor idle.
static const char* run(Largest p, void* stream) {
  int processors = 0;
  if (const char* why = multiprocessors(&processors)) return why;
  p.groups = (p.length + kOwn - 1) / kOwn;
  if (p.groups > kMostGroups || p.k > p.length) return "fxopt.k_largest: expected lists of at most 256 numbers, and k of them";
  p.x_step = p.groups * p.x.strides[1], p.out_step = p.groups * p.out.strides[1];
  p.along = p.x.strides[1] < kClose && p.length >= kClose;
  p.bits = 0;
  while (p.groups << (p.bits + 1) <= kThreads && p.count >> (p.bits + 1) >= int64_t(processors) * kBlocks) p.bits++;
  const int64_t blocks = (p.count + (1 << p.bits) - 1) >> p.bits;
  return launch(k_largest_kernel, dim3(unsigned(blocks)), ((p.groups << p.bits) + 31) / 32 * 32, stream, p);
}

}  // namespace fxopt::largest

// Of floats. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_k_largest(const fxopt::largest::Largest* given, int, void* stream) {
  return fxopt::largest::run(*given, stream);
}
