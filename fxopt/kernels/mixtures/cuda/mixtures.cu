// out[b] = sum over k of softmax(logits[b])[k] * expert k[b], of several mixtures: blockIdx.y is one of them, and a thread has
// UNIT numbers of one row, so that neighbouring threads read and write side by side. Nothing is shared but the rows in L2.
#include "../../floats.cuh"

#include <cmath>

namespace fxopt::mixtures {

constexpr int kThreads = 128, kMostMixtures = 16, kMostExperts = 32, kMostWeights = 16;
constexpr int kFew = 4;  // weights of a mixture: then a thread needs few registers

struct Mixtures {
  Operand logits[kMostMixtures];                 // [rows, weights]
  Operand experts[kMostExperts];                 // [rows, dim], whose last stride is 1
  float* out[kMostMixtures];                     // [rows, dim]
  uint8_t numbers[kMostMixtures][kMostWeights];  // of the experts
  uint8_t weights[kMostMixtures];
  int32_t rows, dim, mixtures, distinct;
};
static_assert(sizeof(Mixtures) == 32 * (kMostMixtures + kMostExperts) + kMostMixtures * (8 + kMostWeights + 1) + 16);

template <int UNIT>
__device__ __forceinline__ Vector<float, UNIT> numbers_at(const float* from) {
  if constexpr (UNIT == 4) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    return {four.x, four.y, four.z, four.w};
  } else if constexpr (UNIT == 2) {
    const float2 two = __ldg(reinterpret_cast<const float2*>(from));
    return {two.x, two.y};
  } else {
    return {__ldg(from)};
  }
}

// As torch's softmax; 0 behind the last of `count` weights.
template <int MOST>
__device__ __forceinline__ void softmax(float (&x)[MOST], int count) {
  float most = x[0], sum = 0;
#pragma unroll
  for (int k = 1; k < MOST; k++) most = k < count ? fmaxf(most, x[k]) : most;
#pragma unroll
  for (int k = 0; k < MOST; k++) sum += x[k] = k < count ? expf(x[k] - most) : 0;
#pragma unroll
  for (int k = 0; k < MOST; k++) x[k] = k < count ? x[k] / sum : 0;
}

// All that a thread reads is on its way before it computes.
template <int UNIT, int MOST>
__global__ void __launch_bounds__(kThreads) mixtures_kernel(const __grid_constant__ Mixtures p) {
  in_turn();
  const int chunks = p.dim / UNIT, at = int(blockIdx.x) * kThreads + int(threadIdx.x);
  const int row = at / chunks, chunk = at - row * chunks, mixture = int(blockIdx.y), count = p.weights[mixture];
  if (row >= p.rows) return;
  const Operand& logits = p.logits[mixture];
  float weights[MOST];
  Vector<float, UNIT> read[MOST], sum{};
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    if (k < count) weights[k] = load<Float>(logits.data, row * logits.strides[0] + k * logits.strides[1]);
  }
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    if (k >= count) continue;
    const Operand& expert = p.experts[p.numbers[mixture][k]];
    read[k] = numbers_at<UNIT>(static_cast<const float*>(expert.data) + row * expert.strides[0] + chunk * UNIT);
  }
  softmax(weights, count);
#pragma unroll
  for (int k = 0; k < MOST; k++) {
#pragma unroll
    for (int i = 0; i < UNIT; i++) sum.value[i] = k < count ? fmaf(weights[k], read[k].value[i], sum.value[i]) : sum.value[i];
  }
  reinterpret_cast<Vector<float, UNIT>*>(p.out[mixture])[at] = sum;
}

template <int UNIT, int MOST>
static const char* run(const Mixtures& p, void* stream) {
  const int64_t threads = int64_t(p.rows) * (p.dim / UNIT);
  const dim3 blocks(unsigned((threads + kThreads - 1) / kThreads), unsigned(p.mixtures));
  return launch(mixtures_kernel<UNIT, MOST>, blocks, kThreads, stream, p);
}

// Whether four numbers of a row can be read and written at once.
static bool is_aligned(const Mixtures& p) {
  int64_t all = p.dim;
  for (int k = 0; k < p.distinct; k++) all |= int64_t(reinterpret_cast<uint64_t>(p.experts[k].data)) / 4 | p.experts[k].strides[0];
  for (int k = 0; k < p.mixtures; k++) all |= int64_t(reinterpret_cast<uint64_t>(p.out[k])) / 4;
  return all % 4 == 0;
}

static bool are_few(const Mixtures& p) {
  for (int k = 0; k < p.mixtures; k++) {
    if (p.weights[k] > kFew) return false;
  }
  return true;
}

}  // namespace fxopt::mixtures

// Of floats. nullptr, or what went wrong. Of many experts a thread has two numbers each: four would need over 128 registers.
FXOPT_EXPORT const char* fxopt_mixtures(const fxopt::mixtures::Mixtures* given, int, void* stream) {
  using namespace fxopt::mixtures;
  if (are_few(*given)) return is_aligned(*given) ? run<4, kFew>(*given, stream) : run<1, kFew>(*given, stream);
  return is_aligned(*given) ? run<2, kMostWeights>(*given, stream) : run<1, kMostWeights>(*given, stream);
}
