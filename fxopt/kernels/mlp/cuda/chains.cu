// Chains of narrow linear layers and what follows each: 16 rows go through all of one in a block's shared memory.
#include <cstring>

#include "tile.cuh"

namespace fxopt::mlp {

using namespace fxopt::tile;

constexpr int kBlocks = 2;  // a multiprocessor, 93 KB of shared memory each
constexpr int kMostSteps = 24, kMostOperands = 48, kMostChains = 12;

// As in ../plan.py.
enum Op : int32_t { kLinear, kBatchNorm, kRelu, kSigmoid, kTanh, kSilu, kGelu, kGeluTanh, kLeakyRelu, kPrelu, kElu, kSoftplus, kClamp, kDice, kLayerNorm, kHardtanh };

struct Step {
  int32_t op, n, k;       // of a linear: outputs and inputs; else n columns
  int32_t tensors[5];     // operands by number, -1: none
  float a, b;
};

// As Python packs it.
struct Given {
  Operand operands[kMostOperands];  // the first is the input, the second the output [rows, n of the last step]
  int32_t rows, steps;
  Step step[kMostSteps];
};
struct Request {
  int32_t chains, unused;
  Given chain[kMostChains];  // so many of them are there
};
static_assert(sizeof(Step) == 40 && sizeof(Given) == kMostOperands * 32 + 8 + kMostSteps * 40);

// What of that is used, one behind the other.
struct Chain {
  const Operand* operands;
  const Step* step;
  int32_t rows, steps;
};
template <int kWords>
struct Chains {
  int32_t rows, steps[kMostChains], operands_at[kMostChains], step_at[kMostChains];  // in words
  int64_t words[kWords];

  __device__ __forceinline__ Chain operator[](int k) const {
    return {reinterpret_cast<const Operand*>(words + operands_at[k]), reinterpret_cast<const Step*>(words + step_at[k]), rows, steps[k]};
  }
};
constexpr int kFewWords = 480, kMostWords = kMostChains * int(sizeof(Given)) / 8;
static_assert(sizeof(Chains<kFewWords>) <= 4096 && sizeof(Chains<kMostWords>) <= 32764);  // launch parameters end there

// An element of a vector that may have one element for all columns.
template <class T>
__device__ __forceinline__ float at(const Chain& c, int operand, int n) {
  return load<T>(c.operands[operand].data, n * c.operands[operand].strides[0]);
}

struct Norm {
  float scale, shift;
};

template <class T>
__device__ __forceinline__ Norm normalizer(const Chain& c, const Step& s, int n) {
  const float scale = (s.tensors[2] >= 0 ? at<T>(c, s.tensors[2], n) : 1.0f) / sqrtf(at<T>(c, s.tensors[1], n) + s.a);
  return Norm{scale, (s.tensors[3] >= 0 ? at<T>(c, s.tensors[3], n) : 0.0f) - at<T>(c, s.tensors[0], n) * scale};
}

template <class F>
__device__ __forceinline__ void each(float (&x)[4], F f) {
#pragma unroll
  for (int r = 0; r < 4; r++) x[r] = f(x[r]);
}

// One step behind a linear, on four rows of a column.
template <class T>
__device__ __forceinline__ void apply(const Chain& c, const Step& s, int n, float (&x)[4]) {
  switch (s.op) {
    case kBatchNorm: {
      const Norm norm = normalizer<T>(c, s, n);
      return each(x, [=](float v) { return fmaf(v, norm.scale, norm.shift); });
    }
    case kRelu: return each(x, [](float v) { return v < 0 ? 0.0f : v; });  // NaN passes, as below
    case kSigmoid: return each(x, sigmoid);
    case kTanh: return each(x, [](float v) { return tanhf(v); });
    case kSilu: return each(x, [](float v) { return v / (1.0f + expf(-v)); });
    case kGelu: return each(x, [](float v) { return 0.5f * v * (1.0f + erff(v * 0.70710678f)); });
    case kGeluTanh: return each(x, [](float v) { return 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))); });
    case kLeakyRelu: return each(x, [&](float v) { return v > 0 ? v : v * s.a; });
    case kPrelu: {
      const float slope = at<T>(c, s.tensors[0], n);
      return each(x, [=](float v) { return v > 0 ? v : v * slope; });
    }
    case kElu: return each(x, [&](float v) { return v > 0 ? v : s.a * expm1f(v); });
    case kSoftplus: return each(x, [](float v) { return v > 20 ? v : log1pf(expf(v)); });
    case kClamp:
    case kHardtanh: return each(x, [&](float v) { const float most = v > s.b ? s.b : v; return most < s.a ? s.a : most; });
    case kDice: {
      const Norm norm = normalizer<T>(c, s, n);
      const float slope = at<T>(c, s.tensors[4], n);
      return each(x, [=](float v) { const float p = sigmoid(fmaf(v, norm.scale, norm.shift)); return slope * (1.0f - p) * v + p * v; });
    }
  }
}

// The weights of a chain, piece by piece, and its inputs beside those of the first layer.
template <class T>
struct Pieces {
  const Chain& c;
  Memory& memory;
  int first_row, rows;
  int step = 0, k = 0, count = 0;

  __device__ __forceinline__ void fetch_next() {
    if (step < c.steps) {
      const Step& s = c.step[step];
      Piece& piece = memory.pieces[count & 1];
      const int most = piece_of<T>(s.n), ks = s.k - k < most ? s.k - k : most;
#pragma unroll 1
      for (int input = 0; input <= int(step == 0); input++)  // compiled once
        fetch<T>(input ? piece.inputs : piece.weights, pitch_of<T>(s.n), c.operands[input ? 0 : s.tensors[0]], input ? first_row : 0, input ? rows : s.n, k, ks);
      k += ks;
      if (k == s.k) {
        k = 0;
        do step++;
        while (step < c.steps && c.step[step].op != kLinear);
      }
    }
    count++;
    cuda::commit_copies();
  }

  // Until the one after the last that was given is there, for all; the next is fetched over the one before.
  __device__ __forceinline__ void wait(bool first) {
    if (first) cuda::wait_copies<1>();
    else cuda::wait_copies<0>();
    __syncthreads();
    if (!first) fetch_next();
  }
};

template <class T, int kWords>
__global__ void __launch_bounds__(kThreads, kBlocks) chain_kernel(const __grid_constant__ Chains<kWords> chains) {
  in_turn();
  using Bits = typename T::Bits;
  Memory& memory = *reinterpret_cast<Memory*>(dynamic_shared());
  const Chain c = chains[int(blockIdx.y)];
  const int first_row = int(blockIdx.x) * kRows, rows = c.rows - first_row < kRows ? c.rows - first_row : kRows;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  Pieces<T> pieces{c, memory, first_row, rows};
#pragma unroll 1
  for (int ahead = 0; ahead < 2; ahead++) pieces.fetch_next();
  int piece = 0;
  for (int at_step = 0; at_step < c.steps;) {
    const Step& linear = c.step[at_step];
    const int N = linear.n, most = piece_of<T>(N), pitch = pitch_of<T>(N);
    const int groups = N > kGroup ? 2 : 1, group = warp % groups, slice = warp / groups, slices = kWarps / groups;
    const int column = warp / 4 * 32 + lane, row = warp % 4 * 4;  // to finish: these, and 64 columns on
    const auto bias_of = [&](int n) { return linear.tensors[1] >= 0 && n < N ? at<T>(c, linear.tensors[1], n) : 0.0f; };
    const float bias[2] = {bias_of(column), bias_of(column + kGroup)};  // on their way
    Sums sums = {};
    for (int k = 0; k < linear.k; k += most, piece++) {
      pieces.wait(piece == 0);
      const Piece& own = memory.pieces[piece & 1];
      const int first = group * kGroup + lane % 8, ks = linear.k - k < most ? linear.k - k : most;
      const Bits* weights = reinterpret_cast<const Bits*>(own.weights) + first * pitch;
      if (at_step == 0) multiply<T, T>(N - group * kGroup, reinterpret_cast<const Bits*>(own.inputs) + row_of(lane) * pitch, pitch, weights, pitch, slice, ks, slices, sums);
      else multiply<Float, T>(N - group * kGroup, memory.rows[row_of(lane)] + k, kMost + 4, weights, pitch, slice, ks, slices, sums);
    }
    __syncthreads();  // before the sums come over the last piece
    float* const of_slices = reinterpret_cast<float*>(&memory.pieces[(piece - 1) & 1]);
#pragma unroll
    for (int j = 0; j < kGroup / 8; j++)
      if (group * kGroup + j * 8 + lane % 8 < N)
        *reinterpret_cast<float4*>(of_slices + (warp * kGroup + j * 8 + lane % 8) * kSumPitch + row_of(lane)) = float4{sums[0][j], sums[1][j], sums[2][j], sums[3][j]};
    __syncthreads();
    int end = at_step + 1;
    while (end < c.steps && c.step[end].op != kLinear) end++;
#pragma unroll 1
    for (int g = 0; g < groups; g++) {
      const int n = g * kGroup + column;
      if (n >= (N + 3) / 4 * 4) break;
      float x[4] = {};
      if (n < N) {
#pragma unroll 4
        for (int s = 0; s < slices; s++) {
          float part[4];
          four(of_slices + ((s * groups + g) * kGroup + column) * kSumPitch + row, part);
#pragma unroll
          for (int r = 0; r < 4; r++) x[r] += part[r];
        }
        each(x, [&](float v) { return v + (g ? bias[1] : bias[0]); });
        for (int s = at_step + 1; s < end; s++) apply<T>(c, c.step[s], n, x);
      }
      auto* to = static_cast<Bits*>(const_cast<void*>(c.operands[1].data)) + int64_t(first_row + row) * N + n;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        if (end < c.steps) memory.rows[row + r][n] = x[r];
        else if (n < N && row + r < rows) to[r * N] = T::rounded(x[r]);
      }
    }
    at_step = end;
  }
}

static int used_operands(const Given& chain) {
  int used = 2;
  for (int s = 0; s < chain.steps; s++)
    for (const int operand : chain.step[s].tensors) used = operand >= used ? operand + 1 : used;
  return used;
}

template <class T, int kWords>
static const char* run(const Request& request, void* stream) {
  static thread_local Chains<kWords> chains;
  chains.rows = request.chain[0].rows;
  int words = 0;
  const auto put = [&](const void* from, size_t bytes) {
    memcpy(chains.words + words, from, bytes);
    words += int(bytes / 8);
    return words - int(bytes / 8);
  };
  for (int k = 0; k < request.chains; k++) {
    const Given& chain = request.chain[k];
    chains.steps[k] = chain.steps;
    chains.operands_at[k] = put(chain.operands, size_t(used_operands(chain)) * sizeof(Operand));
    chains.step_at[k] = put(chain.step, size_t(chain.steps) * sizeof(Step));
  }
  const dim3 blocks(unsigned((chains.rows + kRows - 1) / kRows), unsigned(request.chains));
  return launch(chain_kernel<T, kWords>, blocks, kThreads, stream, chains, int(sizeof(Memory)));
}

template <class T>
static const char* run(const Request& request, void* stream) {
  size_t bytes = 0;
  for (int k = 0; k < request.chains; k++)
    bytes += size_t(used_operands(request.chain[k])) * sizeof(Operand) + size_t(request.chain[k].steps) * sizeof(Step);
  return bytes <= kFewWords * 8 ? run<T, kFewWords>(request, stream) : run<T, kMostWords>(request, stream);
}

}  // namespace fxopt::mlp

// All chains have the same number of rows. dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_mlp(const fxopt::mlp::Request* request, int dtype, void* stream) {
  using namespace fxopt;
  if (request->chains < 1 || request->chains > mlp::kMostChains) return "fxopt.mlp: expected 1 to 12 chains";
  return dtype == 0 ? mlp::run<Float>(*request, stream) : dtype == 1 ? mlp::run<Half>(*request, stream) : mlp::run<BFloat16>(*request, stream);
}
