// From a request to a chain that can run: every tensor of the plan looked up and checked.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "../entry.h"
#include "chain.h"

namespace fxopt {

struct Chain {
  std::vector<Step> steps;
  std::vector<std::vector<float>> vectors;  // scales and shifts of batch norms, and what lay apart: for this call
  const Array* inputs;
  int64_t n_inputs, rows, width, widest, both;  // width: of the inputs side by side; both: what a layer reads and gives
  int64_t last_linear;                    // from here on the steps work on the output
  bool keeps;                             // what a gradient needs is given out, too
  float* kept;                            // the inputs side by side, where they are kept

  int64_t outputs() const { return steps.back().N; }
};

inline const Array* state_of(const Request& request, int64_t n_inputs, int64_t index) {
  if (index < 0) return nullptr;
  if (index >= request.n_operands - n_inputs) refused("fxopt.mlp: the plan reads tensor %lld", (long long)index);
  const Array* operand = request.operands + n_inputs + index;
  if (operand->is_none()) return nullptr;
  if (operand->dtype != kDtypeFloat) refused("fxopt.mlp: expected float32 tensors, found dtype %d", operand->dtype);
  return operand;
}

// Rows [M, N] that lie apart, side by side: for this call.
inline const float* side_by_side(Chain& chain, const Array& from, int64_t M, int64_t N, int64_t row, int64_t column) {
  chain.vectors.emplace_back(product(M, N));
  const auto* read = reinterpret_cast<const float*>(from.data);
  float* to = chain.vectors.back().data();
  for (int64_t m = 0; m < M; m++)
    for (int64_t n = 0; n < N; n++) to[m * N + n] = read[m * row + n * column];
  return to;
}

// A vector of N values, or of one where that is allowed; null where the plan has none.
inline const float* vector_of(Chain& chain, const Array* operand, int64_t N, bool* one = nullptr) {
  if (!operand) return nullptr;
  if (operand->dim != 1) refused("fxopt.mlp: expected a vector of %lld, found %d dims", (long long)N, operand->dim);
  if (one) *one = operand->sizes[0] == 1;
  if (operand->sizes[0] != N && !(one && *one))
    refused("fxopt.mlp: expected a vector of %lld, found %lld", (long long)N, (long long)operand->sizes[0]);
  if (operand->sizes[0] > 1 && operand->strides[0] != 1) return side_by_side(chain, *operand, 1, N, 0, operand->strides[0]);
  return reinterpret_cast<const float*>(operand->data);
}

inline void resolve_linear(Chain& chain, Step& step, const Array* weight, const Array* bias) {
  if (!weight || weight->dim != 2 || weight->sizes[1] != step.K) refused("fxopt.mlp: expected a weight [N, %lld]", (long long)step.K);
  step.N = weight->sizes[0];
  step.bias = vector_of(chain, bias, step.N);
  const int64_t row = weight->strides[0], column = weight->strides[1];
  const bool apart = step.K > 1 && column != 1 && step.N > 1 && row != 1;
  step.across = step.K > 1 && column != 1 && !apart;
  step.weight_stride = apart ? step.K : step.across ? column : row;
  step.weight = apart ? side_by_side(chain, *weight, step.N, step.K, row, column) : reinterpret_cast<const float*>(weight->data);
}

// Running statistics as x * scale + shift, by torch's own formula.
inline void resolve_batch_norm(Chain& chain, Step& step, const Array* const (&tensors)[5]) {
  const float *mean = vector_of(chain, tensors[0], step.N), *variance = vector_of(chain, tensors[1], step.N);
  const float *weight = vector_of(chain, tensors[2], step.N), *bias = vector_of(chain, tensors[3], step.N);
  if (!mean || !variance) refused("fxopt.mlp: a batch norm without running statistics");
  chain.vectors.emplace_back(2 * step.N);
  float *scale = chain.vectors.back().data(), *shift = scale + step.N;
  for (int64_t n = 0; n < step.N; n++) {
    scale[n] = (weight ? weight[n] : 1.0f) / std::sqrt(variance[n] + step.a);
    shift[n] = (bias ? bias[n] : 0.0f) - mean[n] * scale[n];
  }
  step.scale = scale;
  step.shift = shift;
}

inline void resolve_step(Chain& chain, const Request& request, const Record& record, int64_t K) {
  const Array* tensors[5];
  for (int k = 0; k < 5; k++) tensors[k] = state_of(request, chain.n_inputs, record.tensors[k]);
  chain.steps.push_back({Op(record.op), K, K, nullptr, 0, false, nullptr, nullptr, nullptr, nullptr, false,
                         float(record.constants[0]), float(record.constants[1]), nullptr, nullptr});
  Step& step = chain.steps.back();
  switch (step.op) {
    case kLinear: resolve_linear(chain, step, tensors[0], tensors[1]); break;
    case kBatchNorm: resolve_batch_norm(chain, step, tensors); break;
    case kDice:
      resolve_batch_norm(chain, step, tensors);
      step.slope = vector_of(chain, tensors[4], K, &step.one_slope);
      break;
    case kPrelu: step.slope = vector_of(chain, tensors[0], K, &step.one_slope); break;
    case kLayerNorm:
      step.scale = vector_of(chain, tensors[0], K);
      step.shift = vector_of(chain, tensors[1], K);
      break;
    default: break;
  }
  if ((step.op == kPrelu || step.op == kDice) && !step.slope) refused("fxopt.mlp: a slope is missing");
}

inline void resolve_inputs(Chain& chain) {
  const Array& first = chain.inputs[0];
  chain.rows = 1;
  for (int32_t d = 0; d + 1 < first.dim; d++) chain.rows *= first.sizes[d];
  for (int64_t k = 0; k < chain.n_inputs; k++) {
    const Array& input = chain.inputs[k];
    if (input.dim < 1 || input.dim != first.dim || input.dtype != kDtypeFloat) refused("fxopt.mlp: expected float32 inputs of one rank");
    for (int32_t d = 0; d + 1 < first.dim; d++)
      if (input.sizes[d] != first.sizes[d]) refused("fxopt.mlp: inputs differ in dim %d", d);
    chain.width += input.sizes[input.dim - 1];
  }
}

// words: the number of inputs, negative where values are kept, then the plan's records.
inline void resolve(const Request& request, Chain& chain) {
  const int64_t n_steps = request.n_words / int64_t(sizeof(Record) / sizeof(int64_t));
  const int64_t words = n_steps * int64_t(sizeof(Record) / sizeof(int64_t));
  if (n_steps < 1 || request.n_words != words + 1) refused("fxopt.mlp: expected a plan made by encode()");
  chain.keeps = request.words[0] < 0;
  chain.kept = nullptr;
  chain.n_inputs = std::abs(std::max(request.words[0], -request.n_operands - 1));
  if (chain.n_inputs < 1 || chain.n_inputs > request.n_operands) refused("fxopt.mlp: expected %lld inputs", (long long)chain.n_inputs);
  chain.inputs = request.operands;
  chain.width = 0;
  resolve_inputs(chain);
  chain.steps.clear();
  chain.vectors.clear();
  chain.widest = chain.width;
  chain.both = 0;
  chain.last_linear = -1;
  const auto* records = reinterpret_cast<const Record*>(request.words + 1);
  for (int64_t s = 0, K = chain.width; s < n_steps; s++) {
    if (records[s].op < 0 || records[s].op >= kOps) refused("fxopt.mlp: no step %lld", (long long)records[s].op);
    resolve_step(chain, request, records[s], K);
    K = chain.steps.back().N;
    chain.both = std::max(chain.both, chain.steps.back().K + K);
    chain.widest = std::max(chain.widest, K);
    if (chain.steps.back().op == kLinear) chain.last_linear = s;
  }
  if (chain.last_linear < 0) refused("fxopt.mlp: a chain without a linear layer");
}

}  // namespace fxopt
