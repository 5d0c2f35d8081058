// Activations between layers, step by step: numbers of a plan, four positions of a column at a time.
#pragma once
#include "record.cuh"

namespace fxopt::target {

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

}  // namespace fxopt::target
