// Chains of narrow linear layers and what follows each: 32 rows go through all of one in a block's shared memory.
#include <cstring>

#include "../../gemm/tile.cuh"

namespace fxopt::mlp {

using namespace fxopt::tile;

constexpr int kBlocks = 5;  // a multiprocessor: 102 registers, 29 KB of shared memory each
constexpr int kMostSteps = 24, kMostOperands = 48, kMostChains = 12;

// As in plan.py.
enum Op : int32_t { kLinear, kBatchNorm, kRelu, kSigmoid, kTanh, kSilu, kGelu, kGeluTanh, kLeakyRelu, kPrelu, kElu, kSoftplus, kClamp, kDice };

struct Step {
  int32_t op, n, k;       // of a linear: outputs and inputs; else n columns
  int32_t tensors[5];     // operands by number, -1: none
  float a, b;
};

struct Chain {
  Operand operands[kMostOperands];  // the first is the input, the second the output [rows, n of the last step]
  int32_t rows, steps;
  Step step[kMostSteps];
};
template <int kChains>
struct Chains {
  Chain chain[kChains];
};
struct Request {
  int32_t chains, unused;
  Chain chain[kMostChains];  // so many of them are there
};
static_assert(sizeof(Chains<kMostChains>) <= 32764);  // where launch parameters end
static_assert(sizeof(Step) == 40 && sizeof(Chain) == kMostOperands * 32 + 8 + kMostSteps * 40);

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
    case kClamp: return each(x, [&](float v) { const float most = v > s.b ? s.b : v; return most < s.a ? s.a : most; });
    case kDice: {
      const Norm norm = normalizer<T>(c, s, n);
      const float slope = at<T>(c, s.tensors[4], n);
      return each(x, [=](float v) { const float p = sigmoid(fmaf(v, norm.scale, norm.shift)); return slope * (1.0f - p) * v + p * v; });
    }
  }
}

template <class T, int kChains>
__global__ void __launch_bounds__(kThreads, kBlocks) chain_kernel(const __grid_constant__ Chains<kChains> chains) {
  wait_for_stream();
  let_next_start();
  __shared__ __align__(16) Memory memory;
  const Chain& c = chains.chain[kChains == 1 ? 0 : blockIdx.y];
  const int first_row = int(blockIdx.x) * kRows;
  const Operand &x = c.operands[0], &out = c.operands[1];
  const auto input = [&](int row, int k) {
    return first_row + row < c.rows ? load<T>(x.data, (first_row + row) * x.strides[0] + k * x.strides[1]) : 0.0f;
  };
  int N = 0;
  for (int at_step = 0; at_step < c.steps;) {
    const Step& linear = c.step[at_step];
    const Operand& weights = c.operands[linear.tensors[0]];
    const auto add = [&](int k, float(&some)[kWeights]) { add_weights<T>(weights.data, k * weights.strides[1], weights.strides[0], linear.n, 1.0f, some); };
    Sums sums = {};
    N = linear.n;
    multiply(memory, N, linear.k, at_step == 0, input, add, sums);
    int end = at_step + 1;
    while (end < c.steps && c.step[end].op != kLinear) end++;
    finish(memory, N, sums, [&](int n, float(&four)[4]) {
      const float bias = linear.tensors[1] >= 0 ? at<T>(c, linear.tensors[1], n) : 0.0f;
      each(four, [=](float v) { return v + bias; });
      for (int s = at_step + 1; s < end; s++) apply<T>(c, c.step[s], n, four);
    });
    at_step = end;
  }
  __syncthreads();
  auto* to = static_cast<typename T::Bits*>(const_cast<void*>(out.data)) + int64_t(first_row) * N;
  const int rows = c.rows - first_row < kRows ? c.rows - first_row : kRows;
  for (int k = int(threadIdx.x); k < rows * N; k += kThreads) to[k] = T::rounded(memory.rows[k % N][k / N]);
}

template <class T, int kChains>
static const char* run(const Request& request, void* stream) {
  static thread_local Chains<kChains> chains;
  memcpy(&chains, request.chain, size_t(request.chains) * sizeof(Chain));
  const dim3 blocks(unsigned((request.chain[0].rows + kRows - 1) / kRows), unsigned(request.chains));
  return launch(chain_kernel<T, kChains>, blocks, kThreads, stream, chains);
}

template <class T>
static const char* run(const Request& request, void* stream) {
  return request.chains == 1 ? run<T, 1>(request, stream) : run<T, kMostChains>(request, stream);
}

}  // namespace fxopt::mlp

// All chains have the same number of rows. dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_mlp(const fxopt::mlp::Request* request, int dtype, void* stream) {
  using namespace fxopt;
  if (request->chains < 1 || request->chains > mlp::kMostChains) return "fxopt.mlp: expected 1 to 12 chains";
  return dtype == 0 ? mlp::run<Float>(*request, stream) : dtype == 1 ? mlp::run<Half>(*request, stream) : mlp::run<BFloat16>(*request, stream);
}
