// Target attention on tensor cores: a block holds the weights of all layers, folded, and takes rows one by one: its query's
// part of the first layer and its valid positions once, then 64 positions at a time through all layers in shared memory,
// then the softmax and the weighted sum.
#include "../../floats.cuh"
#include "../../gemm/tf32.cuh"
#include "../../gpu_few_rows/grid.cuh"

namespace fxopt::target {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 64, kMost = 128;  // kMost: columns
constexpr int kMostOperands = 48, kMostBlocks = 16, kMostTerms = 16, kMostKeys = 4, kMostProducts = 8, kMostQueries = 8;
constexpr int kMostLayers = 5, kMostNorms = 4, kMostConstants = 12, kMostSteps = 40, kMostTail = 8, kMostRegisters = 12;
constexpr int kParameter = 100, kConstant = 10000;  // from these numbers on what a step reads is an operand, or a constant

// As in plan.py.
enum Op : int32_t { kLinear, kBatchNorm, kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kNeg, kExp, kSigmoid, kTanh, kSilu, kPRelu };
enum TailOp : int32_t { kScale, kShift, kFill, kFillWhere, kTimesMask, kPlusMask, kSoftmax };
enum Activation : int32_t { kSteps, kNone, kRelu };

// Tensors are operands by number, -1: none. Places are floats from the start of shared memory on; widths in it are
// multiples of 8, behind a matrix's own are zeros, and a stride is an odd multiple of 8, for no two rows on one bank.
struct Block { int32_t weight, place, stride, n, width, first, terms; };  // part of a matrix: the sum of some terms
struct Term { int32_t start; float scale; };                              // columns of a weight
struct Query { int32_t row, place, width; };                              // a row's source
struct Keys { int32_t position, column, width; };                         // a source of positions, among the inputs
struct Product { int32_t column, query, width, from; };  // inputs from a column on, times a query or -1; from: the weight's column
struct Layer { int32_t bias, n, k, place, stride, activation, out, begin, end, result; };
struct Norm { int32_t mean, variance, weight, bias; float eps; };
struct Step { int32_t op, out, left, right; };
struct TailStep { int32_t op, mask; float value; };

struct Attention {
  Operand operands[kMostOperands];  // the first is the output
  int32_t rows, exact;
  int32_t positions, blocks, queries, keys, products, layers, tail, values, width, bool_masks;
  int32_t inputs, stride, query, query_weight, query_stride, query_width, scores, bytes;  // places; the inputs' stride
  Block block[kMostBlocks];
  Term term[kMostTerms];
  Query queried[kMostQueries];
  Keys key[kMostKeys];
  Product product[kMostProducts];
  Layer layer[kMostLayers];
  Norm norm[kMostNorms];
  float constant[kMostConstants];
  Step step[kMostSteps];
  TailStep tail_step[kMostTail];
};
static_assert(sizeof(Attention) == kMostOperands * 32 + 80 + kMostBlocks * 28 + kMostTerms * 8 + kMostQueries * 12 + kMostKeys * 12 +
                                       kMostProducts * 16 + kMostLayers * 40 + kMostNorms * 20 + kMostConstants * 4 + kMostSteps * 16 +
                                       kMostTail * 12);
static_assert(sizeof(Attention) <= 4096);

struct Scores {
  float first[kMost];  // a row's part of the first layer
  float by_warp[kWarps];
  int count;
  float* score;  // of every position
  int* valid;
};

// As torch computes it in fp32.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ int padded(int size) { return (size + 7) / 8 * 8; }

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

// The weights of all layers: sums of terms, zeros behind them. A warp a row, 8 of its rows at a time.
template <class T, bool EXACT>
__device__ __forceinline__ void fold(const Attention& a, float* memory) {
  constexpr int kAtOnce = 8;
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;
  for (int b = 0; b < a.blocks; b++) {
    const Block block = a.block[b];
    const Operand& weight = a.operands[block.weight];
    for (int k = lane; k < padded(block.width); k += 32) {
      for (int n0 = warp; n0 < padded(block.n); n0 += kWarps * kAtOnce) {
        float sums[kAtOnce] = {};
        for (int m = block.first; m < block.first + block.terms; m++) {
          const int64_t at = (a.term[m].start + k) * weight.strides[1];
#pragma unroll
          for (int j = 0; j < kAtOnce; j++) {
            const int n = n0 + j * kWarps;
            if (n < block.n && k < block.width) sums[j] = fmaf(a.term[m].scale, load<T>(weight.data, at + n * weight.strides[0]), sums[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          const int n = n0 + j * kWarps;
          if (n < padded(block.n)) memory[block.place + n * block.stride + k] = EXACT ? sums[j] : tf32::rounded(sums[j]);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void read_query(const Attention& a, int row, float* memory) {
  for (int m = 0; m < a.queries; m++)
    for (int k = int(threadIdx.x); k < padded(a.queried[m].width); k += kThreads)
      memory[a.queried[m].place + k] = k < a.queried[m].width ? at<T>(a, a.queried[m].row, row, k) : 0.0f;
}

// What a row has once of the first layer: its bias, and what no position is a factor of. Two threads an output.
template <class T>
__device__ __forceinline__ void multiply_query(const Attention& a, const float* memory, Scores& s) {
  const int n = int(threadIdx.x) / 2, half = int(threadIdx.x) % 2 * 4;
  float sum = 0;
  if (n < a.layer[0].n) {
    const float *weight = memory + a.query_weight + n * a.query_stride, *query = memory + a.query;
    for (int k = half; k < a.query_width; k += 8) {
      const float4 x = *reinterpret_cast<const float4*>(query + k), w = *reinterpret_cast<const float4*>(weight + k);
      sum = fmaf(x.w, w.w, fmaf(x.z, w.z, fmaf(x.y, w.y, fmaf(x.x, w.x, sum))));
    }
  }
  sum += __shfl_xor_sync(kAll, sum, 1);
  if (n < a.layer[0].n) s.first[n] = sum + (a.layer[0].bias >= 0 ? at<T>(a, a.layer[0].bias, n) : 0.0f);
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

// The keys of positions s.valid[first .. first + count): a warp a position, 8 at a time; zeros up to a multiple of 16.
template <class T>
__device__ __forceinline__ void read_keys(const Attention& a, int row, int first, int count, const Scores& s, float* memory) {
  constexpr int kAtOnce = kRows / kWarps;
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;
  for (int m = 0; m < a.keys; m++) {
    const Keys keys = a.key[m];
    for (int k = lane; k < padded(keys.width); k += 32) {
      float values[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) {
        const int r = warp + j * kWarps;
        values[j] = r < count && k < keys.width ? at<T>(a, keys.position, row, s.valid[first + r], k) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; j++) memory[a.inputs + (warp + j * kWarps) * a.stride + keys.column + k] = values[j];
    }
  }
}

// A warp's part of a layer: 16 rows, and every second group of 8 columns.
constexpr int kGroups = kMost / 16;
using Sums = float[kGroups][4];

template <bool EXACT>
__device__ __forceinline__ void multiply(const Attention& a, const Layer& layer, const Product& product, int row, const float* memory, Sums& sums) {
  const int lane = int(threadIdx.x) & 31, group = int(threadIdx.x) / 32 % 2, two = lane % 4 * 2;
  const float* left = memory + a.inputs + (row + lane / 4) * a.stride + product.column + two;
  const float* right = memory + layer.place + (group * 8 + lane / 4) * layer.stride + product.from + two;
  for (int k = 0; k < product.width; k += 8) {
    float2 x = *reinterpret_cast<const float2*>(left + k), y = *reinterpret_cast<const float2*>(left + 8 * a.stride + k);
    if (product.query >= 0) {
      const float2 q = *reinterpret_cast<const float2*>(memory + product.query + two + k);
      x = float2{x.x * q.x, x.y * q.y};
      y = float2{y.x * q.x, y.y * q.y};
    }
    tf32::Fragment<4, EXACT> inputs;
    inputs.set(0, x.x), inputs.set(1, y.x), inputs.set(2, x.y), inputs.set(3, y.y);  // in any order that the weights have too
#pragma unroll
    for (int j = 0; j < kGroups; j++) {
      if (group * 8 + j * 16 >= layer.n) break;  // the whole warp
      const float2 w = *reinterpret_cast<const float2*>(right + j * 16 * layer.stride + k);
      tf32::Fragment<2, EXACT> weights;
      if constexpr (EXACT) weights.set(0, w.x), weights.set(1, w.y);
      else weights.big[0] = w.x, weights.big[1] = w.y;
      tf32::multiply<EXACT>(sums[j], inputs, weights);
    }
  }
}

// Sums and bias, with a ReLU where that is all, where the next layer reads them.
template <class T>
__device__ __forceinline__ void finish(const Attention& a, const Layer& layer, bool first, int row, const Scores& s, const Sums& sums, float* memory) {
  const int lane = int(threadIdx.x) & 31, group = int(threadIdx.x) / 32 % 2;
  float* to = memory + a.inputs + (row + lane / 4) * a.stride;
#pragma unroll
  for (int j = 0; j < kGroups; j++) {
    if (group * 8 + j * 16 >= layer.n) break;
    const int n = group * 8 + j * 16 + lane % 4 * 2;
    float bias[2];
#pragma unroll
    for (int c = 0; c < 2; c++) bias[c] = n + c >= layer.n ? 0.0f : first ? s.first[n + c] : layer.bias >= 0 ? at<T>(a, layer.bias, n + c) : 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float2 x = float2{sums[j][2 * r] + bias[0], sums[j][2 * r + 1] + bias[1]};
      if (layer.activation == kRelu) x = float2{x.x < 0 ? 0.0f : x.x, x.y < 0 ? 0.0f : x.y};  // NaN passes
      *reinterpret_cast<float2*>(to + 8 * r * a.stride + n) = x;
    }
  }
}

// Any other activation: a warp four rows, its lanes the columns.
template <class T>
__device__ __forceinline__ void run_steps(const Attention& a, const Layer& layer, int count, float* memory) {
  const int lane = int(threadIdx.x) & 31;
  for (int row = int(threadIdx.x) / 32 * 4; row < count; row += kWarps * 4) {
    for (int n = lane; n < layer.n; n += 32) {
      float* at = memory + a.inputs + row * a.stride + n;
      Registers registers;
      for (int r = 0; r < 4; r++) registers.value[layer.out][r] = at[r * a.stride];
      for (int k = layer.begin; k < layer.end; k++) run<T>(a, a.step[k], n, registers);
      for (int r = 0; r < 4; r++) at[r * a.stride] = registers.value[layer.result][r];
    }
  }
}

// Positions s.valid[first .. first + count) through all layers; their scores are column 0 of the inputs.
template <class T, bool EXACT>
__device__ __forceinline__ void run_layers(const Attention& a, int count, const Scores& s, float* memory) {
  const int row = int(threadIdx.x) / 64 * 16;
  for (int m = 0; m < a.layers; m++) {
    const Layer& layer = a.layer[m];
    Sums sums = {};
    if (row < count) {
      if (m > 0) multiply<EXACT>(a, layer, Product{0, -1, padded(layer.k), 0}, row, memory, sums);
      else
        for (int k = 0; k < a.products; k++) multiply<EXACT>(a, layer, a.product[k], row, memory, sums);
    }
    __syncthreads();  // everybody has read the inputs
    if (row < count) finish<T>(a, layer, m == 0, row, s, sums, memory);
    __syncthreads();
    if (layer.activation != kSteps) continue;
    run_steps<T>(a, layer, count, memory);
    __syncthreads();
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

// Of all positions: each warp every eighth, its lanes the channels.
template <class T>
__device__ __forceinline__ void sum_values(const Attention& a, int row, const Scores& s, float* memory) {
  const int thread = int(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  float sums[kMost / 32] = {};
#pragma unroll 4
  for (int t = warp; t < a.positions; t += kWarps) {
#pragma unroll
    for (int j = 0; j < kMost / 32; j++)
      if (lane + 32 * j < a.width) sums[j] = fmaf(s.score[t], at<T>(a, a.values, row, t, lane + 32 * j), sums[j]);
  }
  float* by_warp = memory + a.inputs;
#pragma unroll
  for (int j = 0; j < kMost / 32; j++)
    if (lane + 32 * j < a.width) by_warp[warp * a.width + lane + 32 * j] = sums[j];
  __syncthreads();
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.width;
  if (thread >= a.width) return;
  float sum = by_warp[thread];
  for (int w = 1; w < kWarps; w++) sum += by_warp[w * a.width + thread];
  out[thread] = T::rounded(sum);
}

template <class T, bool EXACT>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(const __grid_constant__ Attention a) {
  wait_for_stream();
  let_next_start();
  __shared__ Scores s;
  float* memory = reinterpret_cast<float*>(dynamic_shared());
  const int thread = int(threadIdx.x);
  if (thread == 0) {
    s.score = memory + a.scores;
    s.valid = reinterpret_cast<int*>(s.score + a.positions);
  }
  fold<T, EXACT>(a, memory);
  for (int row = int(blockIdx.x); row < a.rows; row += int(gridDim.x)) {
    if (thread == 0) s.count = 0;
    read_query<T>(a, row, memory);
    __syncthreads();
    find_valid<T>(a, row, s);
    multiply_query<T>(a, memory, s);
    __syncthreads();
    for (int first = 0; first < s.count; first += kRows) {
      const int count = s.count - first < kRows ? s.count - first : kRows;
      read_keys<T>(a, row, first, count, s, memory);
      __syncthreads();
      run_layers<T, EXACT>(a, count, s, memory);
      if (thread < count) s.score[s.valid[first + thread]] = memory[a.inputs + thread * a.stride];
      __syncthreads();
    }
    run_tail<T>(a, row, s);
    __syncthreads();
    if (a.values >= 0) {
      sum_values<T>(a, row, s, memory);
    } else {
      auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.positions;
      for (int t = thread; t < a.positions; t += kThreads) out[t] = T::rounded(s.score[t]);
    }
  }
}

template <class T, bool EXACT>
static const char* launch(const Attention& a, void* stream) {
  int count = 0;
  if (const char* text = multiprocessors(&count)) return text;
  return launch_shared(attention_kernel<T, EXACT>, dim3(unsigned(a.rows < 2 * count ? a.rows : 2 * count)), kThreads, a.bytes, stream, a);
}

}  // namespace fxopt::target

// dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_attention(const fxopt::target::Attention* a, int dtype, void* stream) {
  using namespace fxopt::target;
  if (dtype == 1) return launch<fxopt::Half, false>(*a, stream);
  if (dtype == 2) return launch<fxopt::BFloat16, false>(*a, stream);
  return a->exact ? launch<fxopt::Float, true>(*a, stream) : launch<fxopt::Float, false>(*a, stream);
}
