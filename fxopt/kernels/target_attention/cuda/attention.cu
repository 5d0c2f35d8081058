// Target attention, a block a row: its query's part and its valid positions once, then 32 positions at a time through all
// layers in shared memory, the first one's weight folded as it is read, then the softmax and the weighted sum.
#include "../../gemm/tile.cuh"

namespace fxopt::target {

using namespace fxopt::tile;

constexpr int kMostOperands = 48, kMostTerms = 12, kMostKeys = 4, kMostLayers = 4, kMostNorms = 4, kMostConstants = 12;
constexpr int kMostSteps = 40, kMostTail = 8, kMostRegisters = 12, kMostPositions = 1024, kWarps = kThreads / 32;
constexpr int kParameter = 100, kConstant = 10000;  // from these numbers on what a step reads is an operand, or a constant

// As in plan.py.
enum Op : int32_t { kLinear, kBatchNorm, kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kNeg, kExp, kSigmoid, kTanh, kSilu, kPRelu };
enum TailOp : int32_t { kScale, kShift, kFill, kFillWhere, kTimesMask, kPlusMask, kSoftmax };

// Tensors are operands by number, -1: none.
struct Term { int32_t row, position, start, width; float scale; };
struct Keys { int32_t position, width; };
struct Layer { int32_t weight, bias, n, k; };
struct Norm { int32_t mean, variance, weight, bias; float eps; };
struct Step { int32_t op, out, left, right; };
struct TailStep { int32_t op, mask; float value; };

struct Attention {
  Operand operands[kMostOperands];  // the first is the output
  int32_t rows, positions, terms, keys, steps, tail, score, values, width, bool_masks;
  Layer first;
  Term term[kMostTerms];
  Keys key[kMostKeys];
  Layer layer[kMostLayers];
  Norm norm[kMostNorms];
  float constant[kMostConstants];
  Step step[kMostSteps];
  TailStep tail_step[kMostTail];
};
static_assert(sizeof(Attention) == kMostOperands * 32 + 40 + 16 + kMostTerms * 20 + kMostKeys * 8 + kMostLayers * 16 + kMostNorms * 20 +
                                       kMostConstants * 4 + kMostSteps * 16 + kMostTail * 12);

struct Scores {
  float query[kMost];  // a row's part of the first layer
  float score[kMostPositions];
  int valid[kMostPositions], count;
  float by_warp[kWarps];
};

template <class T>
__device__ __forceinline__ float at(const Attention& a, int operand, int64_t i, int64_t j = 0, int64_t k = 0) {
  const Operand& x = a.operands[operand];
  return load<T>(x.data, i * x.strides[0] + j * x.strides[1] + k * x.strides[2]);
}

template <class T>
__device__ __forceinline__ float mask_at(const Attention& a, int operand, int row, int position) {
  if (!a.bool_masks) return at<T>(a, operand, row, position);
  const Operand& x = a.operands[operand];
  return __ldg(static_cast<const unsigned char*>(x.data) + row * x.strides[0] + position * x.strides[1]) ? 1.0f : 0.0f;
}

// The positions whose score somebody reads: a fill in front of the softmax overwrites the others. In any order.
template <class T>
__device__ __forceinline__ void find_valid(const Attention& a, int row, Scores& s) {
  int fill = 0;
  while (fill < a.tail && a.tail_step[fill].op != kSoftmax && a.tail_step[fill].op != kFill && a.tail_step[fill].op != kFillWhere) fill++;
  const bool fills = fill < a.tail && a.tail_step[fill].op != kSoftmax;
  for (int t = int(threadIdx.x); t < a.positions; t += kThreads) {
    s.score[t] = 0;
    if (!fills || (mask_at<T>(a, a.tail_step[fill].mask, row, t) != 0) == (a.tail_step[fill].op == kFill)) s.valid[atomicAdd(&s.count, 1)] = t;
  }
}

// What a row has once of the first layer: its bias, and what no position is a factor of. A warp an output.
template <class T>
__device__ __forceinline__ void read_query(const Attention& a, int row, Scores& s) {
  const int lane = int(threadIdx.x) & 31;
  for (int n = int(threadIdx.x) >> 5; n < a.first.n; n += kWarps) {
    float sum = 0;
    for (int m = 0; m < a.terms; m++) {
      const Term& term = a.term[m];
      if (term.position >= 0) continue;
      for (int k = lane; k < term.width; k += 32)
        sum = fmaf(term.scale * at<T>(a, a.first.weight, n, term.start + k), at<T>(a, term.row, row, k), sum);
    }
    sum = summed(sum);
    if (lane == 0) s.query[n] = sum + (a.first.bias >= 0 ? at<T>(a, a.first.bias, n) : 0.0f);
  }
}

// Four positions of a column, by register.
struct Registers {
  float value[kMostRegisters][4];
};

template <class T>
__device__ __forceinline__ void read(const Attention& a, const Registers& registers, int number, int n, float (&x)[4]) {
  const float all = number >= kConstant ? a.constant[number - kConstant] : number >= kParameter ? at<T>(a, number - kParameter, n) : 0.0f;
#pragma unroll
  for (int r = 0; r < 4; r++) x[r] = number >= kParameter ? all : registers.value[number][r];
}

template <class F>
__device__ __forceinline__ void each(const float (&x)[4], const float (&y)[4], float (&z)[4], F f) {
#pragma unroll
  for (int r = 0; r < 4; r++) z[r] = f(x[r], y[r]);
}

template <class T>
__device__ __forceinline__ void run(const Attention& a, const Step& step, int n, Registers& registers) {
  float x[4], y[4], z[4] = {};
  read<T>(a, registers, step.left, n, x);
  read<T>(a, registers, step.op < kAdd || (step.op >= kNeg && step.op != kPRelu) ? step.left : step.right, n, y);
  const auto to = [&](auto f) { each(x, y, z, f); };
  switch (step.op) {
    case kBatchNorm: {
      const Norm& norm = a.norm[step.right];
      const float scale = (norm.weight >= 0 ? at<T>(a, norm.weight, n) : 1.0f) / sqrtf(at<T>(a, norm.variance, n) + norm.eps);
      const float shift = (norm.bias >= 0 ? at<T>(a, norm.bias, n) : 0.0f) - at<T>(a, norm.mean, n) * scale;
      to([=](float u, float) { return fmaf(u, scale, shift); });
      break;
    }
    case kAdd: to([](float u, float v) { return u + v; }); break;
    case kSub: to([](float u, float v) { return u - v; }); break;
    case kMul: to([](float u, float v) { return u * v; }); break;
    case kDiv: to([](float u, float v) { return u / v; }); break;
    case kMaximum: to([](float u, float v) { return u > v || u != u ? u : v; }); break;  // NaN passes
    case kMinimum: to([](float u, float v) { return u < v || u != u ? u : v; }); break;
    case kNeg: to([](float u, float) { return -u; }); break;
    case kExp: to([](float u, float) { return expf(u); }); break;
    case kSigmoid: to([](float u, float) { return sigmoid(u); }); break;
    case kTanh: to([](float u, float) { return tanhf(u); }); break;
    case kSilu: to([](float u, float) { return u / (1.0f + expf(-u)); }); break;
    case kPRelu: to([](float u, float v) { return u > 0 ? u : v * u; }); break;
  }
#pragma unroll
  for (int r = 0; r < 4; r++) registers.value[step.out][r] = z[r];
}

// Positions s.valid[first .. first + 32) through all layers; their scores are column 0 of memory.rows.
template <class T>
__device__ __forceinline__ void run_layers(const Attention& a, int row, int first, Scores& s, Memory& memory) {
  const Layer* layer = &a.first;
  for (int begin = 0, out = 0;;) {
    const bool folded = layer == &a.first;
    Sums sums = {};
    for (int part = 0; part < (folded ? a.keys : 1); part++) {
      const int position = a.key[part].position;
      const auto input = [&](int r, int k) { return first + r < s.count ? at<T>(a, position, row, s.valid[first + r], k) : 0.0f; };
      const auto add = [&](int k, float(&weights)[kWeights]) {
        const Operand& weight = a.operands[layer->weight];
        for (int m = 0; m < (folded ? a.terms : 1); m++) {
          const Term term = folded ? a.term[m] : Term{-1, position, 0, 0, 1.0f};
          if (term.position != position) continue;
          const float factor = term.row >= 0 ? term.scale * at<T>(a, term.row, row, k) : term.scale;
          add_weights<T>(weight.data, (term.start + k) * weight.strides[1], weight.strides[0], layer->n, factor, weights);
        }
      };
      multiply(memory, layer->n, folded ? a.key[part].width : layer->k, folded, input, add, sums);
    }
    int end = begin;
    while (end < a.steps && a.step[end].op != kLinear) end++;
    const int result = end < a.steps ? a.step[end].left : a.score;
    finish(memory, layer->n, sums, [&](int n, float(&four)[4]) {
      Registers registers;
      const float bias = folded ? s.query[n] : layer->bias >= 0 ? at<T>(a, layer->bias, n) : 0.0f;
      for (int r = 0; r < 4; r++) registers.value[out][r] = four[r] + bias;
      for (int k = begin; k < end; k++) run<T>(a, a.step[k], n, registers);
      for (int r = 0; r < 4; r++) four[r] = registers.value[result][r];
    });
    if (end == a.steps) return;
    layer = &a.layer[a.step[end].right];
    out = a.step[end].out;
    begin = end + 1;
  }
}

// f of all threads' values.
template <class F>
__device__ __forceinline__ float reduced(float x, Scores& s, F f) {
  for (int width = 16; width >= 1; width >>= 1) x = f(x, __shfl_xor_sync(kAll, x, width));
  __syncthreads();  // everybody has read what was there before
  if ((threadIdx.x & 31) == 0) s.by_warp[threadIdx.x >> 5] = x;
  __syncthreads();
  x = s.by_warp[0];
  for (int w = 1; w < kWarps; w++) x = f(x, s.by_warp[w]);
  return x;
}

// A thread's own positions only, but for what the softmax reduces.
template <class T>
__device__ __forceinline__ void run_tail(const Attention& a, int row, Scores& s) {
  const int thread = int(threadIdx.x);
  for (int k = 0; k < a.tail; k++) {
    const TailStep& step = a.tail_step[k];
    if (step.op != kSoftmax) {
      for (int t = thread; t < a.positions; t += kThreads) {
        const float x = s.score[t], mask = step.mask >= 0 ? mask_at<T>(a, step.mask, row, t) : 0.0f;
        s.score[t] = step.op == kScale ? x * step.value : step.op == kShift ? x + step.value : step.op == kTimesMask ? x * mask
                   : step.op == kPlusMask ? x + mask : (mask != 0) == (step.op == kFill) ? x : step.value;
      }
      continue;
    }
    float most = -INFINITY, total = 0;
    for (int t = thread; t < a.positions; t += kThreads) most = s.score[t] > most || s.score[t] != s.score[t] ? s.score[t] : most;
    most = reduced(most, s, [](float x, float y) { return y > x || y != y ? y : x; });
    for (int t = thread; t < a.positions; t += kThreads) total += s.score[t] = expf(s.score[t] - most);
    total = reduced(total, s, [](float x, float y) { return x + y; });
    for (int t = thread; t < a.positions; t += kThreads) s.score[t] /= total;
  }
}

// Of all positions: each warp every fourth, its lanes the channels.
template <class T>
__device__ __forceinline__ void sum_values(const Attention& a, int row, const Scores& s, Memory& memory) {
  const int thread = int(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  float sums[kMost / 32] = {};
  for (int t = warp; t < a.positions; t += kWarps) {
#pragma unroll
    for (int j = 0; j < kMost / 32; j++)
      if (lane + 32 * j < a.width) sums[j] = fmaf(s.score[t], at<T>(a, a.values, row, t, lane + 32 * j), sums[j]);
  }
#pragma unroll
  for (int j = 0; j < kMost / 32; j++) memory.weight[warp][lane + 32 * j] = sums[j];
  __syncthreads();
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.width;
  float sum = memory.weight[0][thread];
  for (int w = 1; w < kWarps; w++) sum += memory.weight[w][thread];
  if (thread < a.width) out[thread] = T::rounded(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) attention_kernel(const __grid_constant__ Attention a) {
  wait_for_stream();
  __shared__ __align__(16) Memory memory;
  __shared__ Scores s;
  const int row = int(blockIdx.x), thread = int(threadIdx.x);
  if (thread == 0) s.count = 0;
  __syncthreads();
  find_valid<T>(a, row, s);
  read_query<T>(a, row, s);
  __syncthreads();
  for (int first = 0; first < s.count; first += kRows) {
    run_layers<T>(a, row, first, s, memory);
    __syncthreads();
    if (thread < kRows && first + thread < s.count) s.score[s.valid[first + thread]] = memory.rows[0][thread];
  }
  __syncthreads();
  run_tail<T>(a, row, s);
  __syncthreads();
  if (a.values >= 0) return sum_values<T>(a, row, s, memory);
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.positions;
  for (int t = thread; t < a.positions; t += kThreads) out[t] = T::rounded(s.score[t]);
}

}  // namespace fxopt::target

// dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_attention(const fxopt::target::Attention* a, int dtype, void* stream) {
  using namespace fxopt::target;
  auto* kernel = dtype == 0 ? attention_kernel<fxopt::Float> : dtype == 1 ? attention_kernel<fxopt::Half> : attention_kernel<fxopt::BFloat16>;
  return fxopt::launch(kernel, dim3(unsigned(a->rows)), kThreads, stream, *a);
}
