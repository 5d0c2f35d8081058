// Target attention on tensor cores: a block holds the weights of all layers, folded. Its warps are in teams, and each team
// takes rows by itself: the query's part of the first layer and the valid positions once, then a warp 16 of these at a time
// through all layers, then the softmax and the weighted sum. Teams of one warp where rows are many meet nobody.
#include "../../gemm/tf32.cuh"
#include "../../grid.cuh"
#include "steps.cuh"
#include "tail.cuh"

namespace fxopt::target {

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

// Every norm as a scale and a shift for each column.
template <class T>
__device__ __forceinline__ void fold_norms(const Attention& a, float* memory) {
  for (const Norm& norm : a.norm) {  // n is 0 of those that there are not
    for (int n = int(threadIdx.x); n < norm.n; n += int(blockDim.x)) {
      const float scale = (norm.weight >= 0 ? at<T>(a, norm.weight, n) : 1.0f) / sqrtf(at<T>(a, norm.variance, n) + norm.eps);
      memory[norm.place + n * 2] = scale;
      memory[norm.place + n * 2 + 1] = (norm.bias >= 0 ? at<T>(a, norm.bias, n) : 0.0f) - at<T>(a, norm.mean, n) * scale;
    }
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

template <class T, bool EXACT, bool STEPS>
__device__ __forceinline__ void run_layers(const Attention& a, const float* memory, const Team& team) {
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
    if constexpr (!STEPS) continue;
    if (a.layer[m].activation != kSteps) continue;
    run_steps<T>(a, a.layer[m], memory, team);
    __syncwarp();
  }
}

template <class T, bool EXACT, bool STEPS>
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
    run_layers<T, EXACT, STEPS>(a, memory, team);
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

template <class T, bool EXACT, bool STEPS>
__global__ void __launch_bounds__(kWarps * 32) attention_kernel(const __grid_constant__ Attention a) {
  in_turn();
  float* memory = reinterpret_cast<float*>(dynamic_shared());
  if constexpr (STEPS) fold_norms<T>(a, memory);
  fold<T, EXACT>(a, memory);
  __syncthreads();
  const Team team(a, memory);
  const int teams = int(blockDim.x) / team.threads();
  for (int row = int(blockIdx.x) + team.number() * int(gridDim.x); row < a.rows; row += teams * int(gridDim.x))
    attend<T, EXACT, STEPS>(a, row, memory, team);
}

static int bytes_of(const Attention& a, int warps) { return 4 * (a.weights + warps / a.team * a.of_team + warps * kRows * a.stride); }

static bool has_steps(const Attention& a) {
  bool found = false;
  for (int m = 0; m < a.layers; m++) found |= a.layer[m].activation == kSteps;
  return found;
}

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
  const auto kernel = has_steps(a) ? attention_kernel<T, EXACT, true> : attention_kernel<T, EXACT, false>;
  return fxopt::launch(kernel, dim3(unsigned(a.rows < count ? a.rows : count)), warps * 32, stream, a, bytes_of(a, warps));
}

}  // namespace fxopt::target

// dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_attention(const fxopt::target::Attention* a, int dtype, void* stream) {
  using namespace fxopt::target;
  if (dtype == 1) return launch<fxopt::Half, false>(*a, stream);
  if (dtype == 2) return launch<fxopt::BFloat16, false>(*a, stream);
  return a->exact ? launch<fxopt::Float, true>(*a, stream) : launch<fxopt::Float, false>(*a, stream);
}
