// Target attention on tensor cores: a block holds the weights of all layers, folded. Its warps are in teams, and each team
// takes rows by itself: the query's part of the first layer and the valid positions once, then a warp 16 of these at a time
// through all layers, then the softmax and the weighted sum. Teams of one warp where rows are many meet nobody.
#include "../../floats.cuh"
#include "../../gemm/tf32.cuh"
#include "../../gpu_few_rows/grid.cuh"

namespace fxopt::target {

constexpr int kWarps = 16, kRows = 16, kMost = 128;  // warps of a block, at most; positions of a warp at a time; columns
constexpr int kMostOperands = 48, kMostBlocks = 16, kMostTerms = 16, kMostKeys = 4, kMostProducts = 8, kMostQueries = 8;
constexpr int kMostLayers = 5, kMostNorms = 4, kMostConstants = 13, kMostSteps = 40, kMostTail = 8, kMostRegisters = 12;
constexpr int kParameter = 100, kConstant = 10000;  // from these numbers on what a step reads is an operand, or a constant

// As in plan.py.
enum Op : int32_t { kLinear, kBatchNorm, kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kNeg, kExp, kSigmoid, kTanh, kSilu, kPRelu };
enum TailOp : int32_t { kScale, kShift, kFill, kFillWhere, kTimesMask, kPlusMask, kSoftmax };
enum Activation : int32_t { kSteps, kNone, kRelu };

// Tensors are operands by number, -1: none. Places are floats from the start of shared memory on, a query's from that of
// the team; widths in it are multiples of 8, and behind a matrix's own are zeros. Matrices are tiles of 8 rows and 8
// columns, those of the same columns side by side, for fragments without an address of their own; their rows are as many as
// run_layers knows. The stride of a warp's inputs is an odd multiple of 8, for no two rows on one bank.
struct Block { int32_t weight, place, n, rows, width, first, terms; };  // part of a matrix: the sum of some terms
struct Term { int32_t start; float scale; };                              // columns of a weight
struct Query { int32_t row, place, width; };                              // a row's source
struct Keys { int32_t position, column, width; };                         // a source of positions, among the inputs
struct Product { int32_t column, query, width, from; };  // inputs from a column on, times a query or -1; from: the weight's column
struct Layer { int32_t bias, n, groups, k, place, from, to, activation, out, begin, end, result; };
struct Norm { int32_t mean, variance, weight, bias; float eps; };
struct Step { int32_t op, out, left, right; };
struct TailStep { int32_t op, mask; float value; };

struct Attention {
  Operand operands[kMostOperands];  // the first is the output
  int32_t rows, exact;
  int32_t positions, blocks, queries, keys, products, layers, tail, values, width, bool_masks;
  int32_t stride, query_weight, query_width;  // the first: of a warp's inputs
  int32_t weights, of_team, bytes, team;  // floats of shared memory; its bytes that a block may have; warps of a team
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
static_assert(sizeof(Attention) == kMostOperands * 32 + 76 + kMostBlocks * 28 + kMostTerms * 8 + kMostQueries * 12 + kMostKeys * 12 +
                                       kMostProducts * 16 + kMostLayers * 48 + kMostNorms * 20 + kMostConstants * 4 + kMostSteps * 16 +
                                       kMostTail * 12);
static_assert(sizeof(Attention) <= 4096);

// Warps that take a row together, and what they have of shared memory: few pointers, to have few registers.
struct Team {
  int warps, thread;
  float* memory;
  float* score;   // of every position
  float* inputs;  // of this warp [kRows, stride]; those of the team lie side by side

  __device__ Team(const Attention& a, float* block) : warps(a.team), thread(int(threadIdx.x) % (a.team * 32)) {
    memory = block + a.weights + number() * a.of_team;
    score = query() + a.query_width;
    inputs = block + a.weights + int(blockDim.x) / threads() * a.of_team + int(threadIdx.x) / 32 * kRows * a.stride;
  }

  __device__ __forceinline__ int number() const { return int(threadIdx.x) / threads(); }
  __device__ __forceinline__ int threads() const { return warps * 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int& count() const { return *reinterpret_cast<int*>(memory); }  // of valid positions
  __device__ __forceinline__ float* by_warp() const { return memory + 8; }
  __device__ __forceinline__ float* first() const { return memory + 8 + kWarps; }  // the row's part of the first layer
  __device__ __forceinline__ float* query() const { return memory + 8 + kWarps + kMost; }
  __device__ __forceinline__ int* valid(const Attention& a) const { return reinterpret_cast<int*>(score + a.positions); }

  __device__ __forceinline__ void barrier() const {
    if (warps == 1) __syncwarp();
    else __barrier_sync_count(unsigned(1 + number()), unsigned(threads()));
  }
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
__device__ __forceinline__ void find_valid(const Attention& a, int row, const Team& team) {
  const int lane = team.thread & 31;
  int fill = 0;
  while (fill < a.tail && a.tail_step[fill].op != kSoftmax && a.tail_step[fill].op != kFill && a.tail_step[fill].op != kFillWhere) fill++;
  const bool fills = fill < a.tail && a.tail_step[fill].op != kSoftmax;
  for (int t = team.thread; t - lane < a.positions; t += team.threads()) {
    const bool valid = t < a.positions && (!fills || (mask_at<T>(a, a.tail_step[fill].mask, row, t) != 0) == (a.tail_step[fill].op == kFill));
    if (t < a.positions) team.score[t] = 0;
    const unsigned all = __ballot_sync(kAll, valid);
    int before = lane == 0 ? atomicAdd(&team.count(), __popc(all)) : 0;
    before = __shfl_sync(kAll, before, 0) + __popc(all & ((1u << lane) - 1));
    if (valid) team.valid(a)[before] = t;
  }
}

// The weights of all layers: sums of terms, zeros behind them. A warp 8 rows of 32 columns at a time.
template <class T, bool EXACT>
__device__ __forceinline__ void fold(const Attention& a, float* memory) {
  constexpr int kAtOnce = 8;
  const int lane = int(threadIdx.x) & 31, warps = int(blockDim.x) >> 5;
  int turn = int(threadIdx.x) >> 5;
  for (int b = 0; b < a.blocks; b++) {
    const Block block = a.block[b];
    const Operand& weight = a.operands[block.weight];
    const int columns = (block.width + 31) / 32, turns = columns * (block.rows / kAtOnce);
    for (; turn < turns; turn += warps) {
      const int n0 = turn / columns * kAtOnce, k = turn % columns * 32 + lane;
      float sums[kAtOnce] = {};
      for (int m = block.first; m < block.first + block.terms; m++) {
        const int64_t at = (a.term[m].start + k) * weight.strides[1];
#pragma unroll
        for (int n = n0; n < n0 + kAtOnce; n++)
          if (n < block.n && k < block.width) sums[n - n0] = fmaf(a.term[m].scale, load<T>(weight.data, at + n * weight.strides[0]), sums[n - n0]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; j++)
        if (k < padded(block.width)) memory[block.place + (k / 8 * (block.rows / 8) + n0 / kAtOnce) * 64 + j * 8 + k % 8] = EXACT ? sums[j] : tf32::rounded(sums[j]);
    }
    turn -= turns;
  }
}

template <class T>
__device__ __forceinline__ void read_query(const Attention& a, int row, const Team& team) {
  for (int m = 0; m < a.queries; m++)
    for (int k = team.thread; k < padded(a.queried[m].width); k += team.threads())
      team.query()[a.queried[m].place + k] = k < a.queried[m].width ? at<T>(a, a.queried[m].row, row, k) : 0.0f;
}

// What a row has once of the first layer: its bias, and what no position is a factor of. Two threads an output.
template <class T>
__device__ __forceinline__ void multiply_query(const Attention& a, const float* memory, const Team& team) {
  const int half = team.thread % 2 * 4, rows = a.layer[0].groups * 8;
  for (int n = team.thread / 2; n / 16 * 16 < rows; n += team.threads() / 2) {  // the whole warp
    const float bias = n < a.layer[0].n && a.layer[0].bias >= 0 ? at<T>(a, a.layer[0].bias, n) : 0.0f;
    const float* weight = memory + a.query_weight + n * 8;
    float sum = 0;
#pragma unroll 4
    for (int k = half; k < a.query_width && n < rows; k += 8) {
      const float4 x = *reinterpret_cast<const float4*>(team.query() + k), w = *reinterpret_cast<const float4*>(weight + k / 8 * 8 * rows + half);
      sum = fmaf(x.w, w.w, fmaf(x.z, w.z, fmaf(x.y, w.y, fmaf(x.x, w.x, sum))));
    }
    sum += __shfl_xor_sync(kAll, sum, 1);
    if (n < rows) team.first()[n] = sum + bias;
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

// The keys of positions valid[first .. first + count), zeros behind their columns: a lane a column, 16 positions at once. Rows
// behind the last are the first once more, as no load waits for a branch; nobody reads what becomes of them.
template <class T>
__device__ __forceinline__ void read_keys(const Attention& a, int row, int first, int count, const Team& team) {
  const int lane = team.thread & 31, *valid = team.valid(a) + first;
  for (int m = 0; m < a.keys; m++) {
    const Keys keys = a.key[m];
    const Operand& x = a.operands[keys.position];
    for (int k = lane; k < padded(keys.width); k += 32) {
      const int64_t from = row * x.strides[0] + (k < keys.width ? k : 0) * x.strides[2];
      float values[kRows];
#pragma unroll
      for (int r = 0; r < kRows; r++) values[r] = load<T>(x.data, from + valid[r < count ? r : 0] * x.strides[1]);
#pragma unroll
      for (int r = 0; r < kRows; r++) team.inputs[r * a.stride + keys.column + k] = k < keys.width ? values[r] : 0.0f;
    }
  }
}

template <bool EXACT, int GROUPS>
__device__ __forceinline__ void multiply(const Attention& a, const Layer& layer, const Product& product, int group, const float* memory, const Team& team, float (&sums)[GROUPS][4]) {
  const int lane = team.thread & 31, two = lane % 4 * 2;
  const float* left = team.inputs + lane / 4 * a.stride + product.column + two;
  const float* right = memory + layer.place + product.from * layer.groups * 8 + group * 64 + lane * 2;
  const int rows = 8 * a.stride, step = layer.groups * 64;
#pragma unroll(GROUPS * (EXACT ? 2 : 1) <= 10 ? 2 : 1)
  for (int k = 0; k < product.width; k += 8) {
    float2 x = *reinterpret_cast<const float2*>(left + k), y = *reinterpret_cast<const float2*>(left + rows + k);
    if (product.query >= 0) {
      const float2 q = *reinterpret_cast<const float2*>(team.query() + product.query + two + k);
      x = float2{x.x * q.x, x.y * q.y};
      y = float2{y.x * q.x, y.y * q.y};
    }
    tf32::Fragment<4, EXACT> inputs;
    inputs.set(0, x.x), inputs.set(1, y.x), inputs.set(2, x.y), inputs.set(3, y.y);  // in any order that the weights have too
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
      const float2 w = *reinterpret_cast<const float2*>(right + k / 8 * step + j * 64);
      tf32::Fragment<2, EXACT> weights;
      if constexpr (EXACT) weights.set(0, w.x), weights.set(1, w.y);
      else weights.big[0] = w.x, weights.big[1] = w.y;
      tf32::multiply<EXACT>(sums[j], inputs, weights);
    }
  }
}

// 16 positions through some columns of a layer, and a ReLU where that is all. Where these are not all columns, the layer's
// are not where its inputs are.
template <class T, bool EXACT, int GROUPS>
__device__ __forceinline__ void run_groups(const Attention& a, int m, int group, const float* memory, const Team& team) {
  const Layer& layer = a.layer[m];
  const int lane = team.thread & 31, begin = group * 8 + lane % 4 * 2;
  float sums[GROUPS][4];
#pragma unroll
  for (int c = 0; c < GROUPS * 2; c++) {
    const int n = begin + c / 2 * 8 + c % 2;
    float bias = 0;
    if (m == 0) bias = team.first()[n];
    else if (layer.bias >= 0) bias = at<T>(a, layer.bias, n < layer.n ? n : 0);
    sums[c / 2][c % 2] = sums[c / 2][2 + c % 2] = n < layer.n ? bias : 0.0f;
  }
  if (m > 0) multiply<EXACT, GROUPS>(a, layer, Product{layer.from, -1, padded(layer.k), 0}, group, memory, team, sums);
  else
    for (int k = 0; k < a.products; k++) multiply<EXACT, GROUPS>(a, layer, a.product[k], group, memory, team, sums);
  __syncwarp();  // everybody has read the inputs
  float* to = team.inputs + lane / 4 * a.stride + layer.to + begin;
#pragma unroll
  for (int j = 0; j < GROUPS; j++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float2 x = float2{sums[j][2 * r], sums[j][2 * r + 1]};
      if (layer.activation == kRelu) x = float2{x.x < 0 ? 0.0f : x.x, x.y < 0 ? 0.0f : x.y};  // NaN passes
      *reinterpret_cast<float2*>(to + 8 * r * a.stride + j * 8) = x;
    }
  }
  __syncwarp();
}

// Any other activation: four positions at a time, lanes are the columns.
template <class T>
__device__ __forceinline__ void run_steps(const Attention& a, const Layer& layer, int count, const Team& team) {
  for (int row = 0; row < count; row += 4) {
    for (int n = team.thread & 31; n < layer.n; n += 32) {
      float* at = team.inputs + row * a.stride + layer.to + n;
      Registers registers;
      for (int r = 0; r < 4; r++) registers.value[layer.out][r] = at[r * a.stride];
      for (int k = layer.begin; k < layer.end; k++) run<T>(a, a.step[k], n, registers);
      for (int r = 0; r < 4; r++) at[r * a.stride] = registers.value[layer.result][r];
    }
  }
}

template <class T, bool EXACT>
__device__ __forceinline__ void run_layers(const Attention& a, int count, const float* memory, const Team& team) {
  for (int m = 0; m < a.layers; m++) {
    switch (a.layer[m].groups) {
      case 1: run_groups<T, EXACT, 1>(a, m, 0, memory, team); break;
      case 2: run_groups<T, EXACT, 2>(a, m, 0, memory, team); break;
      case 3: run_groups<T, EXACT, 3>(a, m, 0, memory, team); break;
      case 5: run_groups<T, EXACT, 5>(a, m, 0, memory, team); break;
      case 10: run_groups<T, EXACT, 10>(a, m, 0, memory, team); break;
      default:  // 8 or 16: more in registers spill
        for (int group = 0; group < a.layer[m].groups; group += 8) run_groups<T, EXACT, 8>(a, m, group, memory, team);
    }
    if (a.layer[m].activation != kSteps) continue;
    run_steps<T>(a, a.layer[m], count, team);
    __syncwarp();
  }
}

// f of all values of a team.
template <class F>
__device__ __forceinline__ float reduced(float x, const Team& team, F f) {
  for (int width = 16; width >= 1; width >>= 1) x = f(x, __shfl_xor_sync(kAll, x, width));
  if (team.warps == 1) return x;
  team.barrier();  // everybody has read what was there before
  if ((team.thread & 31) == 0) team.by_warp()[team.warp()] = x;
  team.barrier();
  x = team.by_warp()[0];
  for (int w = 1; w < team.warps; w++) x = f(x, team.by_warp()[w]);
  return x;
}

// A thread's own positions only, but for what the softmax reduces.
template <class T>
__device__ __forceinline__ void run_tail(const Attention& a, int row, const Team& team) {
  for (int k = 0; k < a.tail; k++) {
    const TailStep& step = a.tail_step[k];
    if (step.op != kSoftmax) {
      for (int t = team.thread; t < a.positions; t += team.threads()) {
        const float x = team.score[t], mask = step.mask >= 0 ? mask_at<T>(a, step.mask, row, t) : 0.0f;
        team.score[t] = step.op == kScale ? x * step.value : step.op == kShift ? x + step.value : step.op == kTimesMask ? x * mask
                      : step.op == kPlusMask ? x + mask : (mask != 0) == (step.op == kFill) ? x : step.value;
      }
      continue;
    }
    float most = -INFINITY, total = 0;
    for (int t = team.thread; t < a.positions; t += team.threads()) most = team.score[t] > most || team.score[t] != team.score[t] ? team.score[t] : most;
    most = reduced(most, team, [](float x, float y) { return y > x || y != y ? y : x; });
    for (int t = team.thread; t < a.positions; t += team.threads()) total += team.score[t] = expf(team.score[t] - most);
    total = reduced(total, team, [](float x, float y) { return x + y; });
    for (int t = team.thread; t < a.positions; t += team.threads()) team.score[t] /= total;
  }
}

// Of all positions: a warp every so many, 16 at once, its lanes the channels.
template <class T>
__device__ __forceinline__ void sum_values(const Attention& a, int row, const Team& team) {
  constexpr int kAtOnce = 16;
  const Operand& x = a.operands[a.values];
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.width;
  for (int channel = team.thread & 31; channel < a.width; channel += 32) {
    const int64_t from = row * x.strides[0] + channel * x.strides[2];
    float sum = 0;
    for (int t0 = team.warp(); t0 < a.positions; t0 += team.warps * kAtOnce) {
      float values[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int t = t0 + u * team.warps;
        values[u] = load<T>(x.data, from + (t < a.positions ? t : t0) * x.strides[1]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int t = t0 + u * team.warps;
        const float next = fmaf(team.score[t < a.positions ? t : t0], values[u], sum);
        sum = t < a.positions ? next : sum;
      }
    }
    if (team.warps == 1) out[channel] = T::rounded(sum);
    else team.inputs[channel] = sum;
  }
  if (team.warps == 1) return;
  team.barrier();
  for (int channel = team.thread; channel < a.width; channel += team.threads()) {
    float sum = 0;
    for (int w = 0; w < team.warps; w++) sum += team.inputs[(w - team.warp()) * kRows * a.stride + channel];
    out[channel] = T::rounded(sum);
  }
}

template <class T, bool EXACT>
__device__ __forceinline__ void attend(const Attention& a, int row, const float* memory, const Team& team) {
  const int lane = team.thread & 31;
  if (team.thread == 0) team.count() = 0;
  read_query<T>(a, row, team);
  team.barrier();
  find_valid<T>(a, row, team);
  multiply_query<T>(a, memory, team);
  team.barrier();
  for (int first = team.warp() * kRows; first < team.count(); first += team.warps * kRows) {
    const int count = team.count() - first < kRows ? team.count() - first : kRows;
    read_keys<T>(a, row, first, count, team);
    __syncwarp();
    run_layers<T, EXACT>(a, count, memory, team);
    if (lane < count) team.score[team.valid(a)[first + lane]] = team.inputs[lane * a.stride + a.layer[a.layers - 1].to];
    __syncwarp();
  }
  team.barrier();
  run_tail<T>(a, row, team);
  team.barrier();
  if (a.values >= 0) return sum_values<T>(a, row, team);
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.positions;
  for (int t = team.thread; t < a.positions; t += team.threads()) out[t] = T::rounded(team.score[t]);
}

template <class T, bool EXACT>
__global__ void __launch_bounds__(kWarps * 32) attention_kernel(const __grid_constant__ Attention a) {
  wait_for_stream();
  let_next_start();
  float* memory = reinterpret_cast<float*>(dynamic_shared());
  fold<T, EXACT>(a, memory);
  __syncthreads();
  const Team team(a, memory);
  const int teams = int(blockDim.x) / team.threads();
  for (int row = int(blockIdx.x) + team.number() * int(gridDim.x); row < a.rows; row += teams * int(gridDim.x))
    attend<T, EXACT>(a, row, memory, team);
}

static int bytes_of(const Attention& a, int warps) { return 4 * (a.weights + warps / a.team * a.of_team + warps * kRows * a.stride); }

// One block a multiprocessor, in teams as small as its rows leave none idle, and as few warps as have positions.
template <class T, bool EXACT>
static const char* launch(Attention a, void* stream) {
  int count = 0, warps = kWarps;
  if (const char* text = multiprocessors(&count)) return text;
  for (;; warps /= 2) {
    for (a.team = warps; a.team > 1 && (a.rows > warps / a.team * count || a.team / 2 * kRows >= a.positions);) a.team /= 2;
    while (a.team < warps && bytes_of(a, warps) > a.bytes) a.team *= 2;
    if (bytes_of(a, warps) <= a.bytes || warps == 2) break;  // encode() saw to these
  }
  return launch_shared(attention_kernel<T, EXACT>, dim3(unsigned(a.rows < count ? a.rows : count)), warps * 32, bytes_of(a, warps), stream, a);
}

}  // namespace fxopt::target

// dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_attention(const fxopt::target::Attention* a, int dtype, void* stream) {
  using namespace fxopt::target;
  if (dtype == 1) return launch<fxopt::Half, false>(*a, stream);
  if (dtype == 2) return launch<fxopt::BFloat16, false>(*a, stream);
  return a->exact ? launch<fxopt::Float, true>(*a, stream) : launch<fxopt::Float, false>(*a, stream);
}
