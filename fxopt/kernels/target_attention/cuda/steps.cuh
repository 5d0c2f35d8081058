// Activations between layers, step by step: numbers of a plan, all positions of a warp in one column at a time, so that what
// a step costs by itself is paid once for them.
#pragma once
#include "record.cuh"

namespace fxopt::target {

// Positions of a column, by register.
struct Registers {
  float value[kMostRegisters][kRows];
};

template <class T>
__device__ __forceinline__ void read(const Attention& a, const Registers& registers, int number, int n, float (&x)[kRows]) {
  const float all = number >= kConstant ? a.constant[number - kConstant] : number >= kParameter ? at<T>(a, number - kParameter, n) : 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; r++) x[r] = number >= kParameter ? all : registers.value[number][r];
}

template <class F>
__device__ __forceinline__ void each(const float (&x)[kRows], const float (&y)[kRows], float (&z)[kRows], F f) {
#pragma unroll
  for (int r = 0; r < kRows; r++) z[r] = f(x[r], y[r]);
}

template <class T>
__device__ __forceinline__ void run(const Attention& a, const Step& step, int n, const float* memory, Registers& registers) {
  float x[kRows], y[kRows], z[kRows] = {};
  read<T>(a, registers, step.left, n, x);
  read<T>(a, registers, step.op < kAdd || (step.op >= kNeg && step.op != kPRelu) ? step.left : step.right, n, y);
  const auto to = [&](auto f) { each(x, y, z, f); };
  switch (step.op) {
    case kBatchNorm: {
      const float* norm = memory + a.norm[step.right].place + n * 2;
      const float scale = norm[0], shift = norm[1];
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
  for (int r = 0; r < kRows; r++) registers.value[step.out][r] = z[r];
}

// Any other activation: lanes are the columns.
template <class T>
__device__ __forceinline__ void run_steps(const Attention& a, const Layer& layer, const float* memory, const Team& team) {
  for (int n = team.thread & 31; n < layer.n; n += 32) {
    float* at = team.inputs + layer.to + n;
    Registers registers;
    for (int r = 0; r < kRows; r++) registers.value[layer.out][r] = at[r * a.stride];
    for (int k = layer.begin; k < layer.end; k++) run<T>(a, a.step[k], n, memory, registers);
    for (int r = 0; r < kRows; r++) at[r * a.stride] = registers.value[layer.result][r];
  }
}

}  // namespace fxopt::target
