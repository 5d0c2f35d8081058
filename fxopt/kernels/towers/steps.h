// The steps of a tower program on a block of rows. Compiled once per instruction set.
#pragma once
#include <cmath>

#include "../gemm/gemm.h"
#include "../simd/softmax.h"
#include "program.h"

namespace fxopt::towers::FXOPT_ISA {

using namespace fxopt::FXOPT_ISA;

// Rows of something: row r is at data + r * stride, its elements side by side.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  T* operator[](int64_t row) const { return data + row * stride; }
};

inline Rows<float> buffer_rows(const Call& call, const Block& block, int64_t index, int64_t column) {
  const Buffer& buffer = call.buffers[index];
  float* data = buffer.output ? reinterpret_cast<float*>(buffer.output) + block.row0 * buffer.width
                          : reinterpret_cast<float*>(block.scratch) + buffer.before * (block.row1 - block.row0);
  return {data + column, buffer.width};
}

// Element offset of a row whose leading dims do not collapse into one.
inline int64_t offset_of_row(const Input& input, int64_t row) {
  const Array& x = *input.operand;
  int64_t offset = 0;
  for (int32_t d = x.dim - 2 - input.inner; d >= 0; d--) {
    offset += row % x.sizes[d] * x.strides[d];
    row /= x.sizes[d];
  }
  return offset;
}

// Columns [start, start + width) of the block's rows; copied side by side where they do not lie so.
inline Rows<const float> source_rows(const Call& call, const Block& block, const Source& source, int64_t width, std::vector<float>& copy) {
  if (!source.is_input) {
    const Rows<float> rows = buffer_rows(call, block, source.tensor, source.start);
    return {rows.data, rows.stride};
  }
  const Input& input = call.inputs[source.tensor];
  const float* data = reinterpret_cast<const float*>(input.operand->data) + source.start * input.element_stride +
                  (source.place > 0 ? source.place * input.inner_stride : 0);
  if (input.collapses && (input.element_stride == 1 || width == 1)) return {data + block.row0 * input.row_stride, input.row_stride};
  copy.resize(size_t(width * (block.row1 - block.row0)));
  for (int64_t row = block.row0; row < block.row1; row++) {
    const float* from = data + (input.collapses ? row * input.row_stride : offset_of_row(input, row));
    for (int64_t k = 0; k < width; k++) copy[(row - block.row0) * width + k] = from[k * input.element_stride];
  }
  return {copy.data(), width};
}

template <class F>
inline void map(float* y, int64_t n, F f) {
  for (; n > 0; n -= kLanes, y += kLanes) store_part(y, f(load_part(y, n)), n);
}

inline void activate(int64_t activation, float* y, int64_t n) {
  switch (activation) {
    case kRelu: return map(y, n, [](Floats x) { return x < 0.0f ? Floats{} : x; });
    case kSigmoid: return map(y, n, [](Floats x) { return sigmoid(x); });
    case kTanh: return map(y, n, [](Floats x) { return tanh(x); });
    default: return;
  }
}

inline void run_linear(const Call& call, const LinearStep& linear, const Block& block, int64_t n0, int64_t n1) {
  thread_local std::vector<float> copied_x, copied_w;
  const Array& weight = call.weight(linear.weight);
  const int64_t K = weight.sizes[1], N = weight.sizes[0];
  const Rows<const float> x = source_rows(call, block, linear.x, K, copied_x);
  const Rows<float> y = buffer_rows(call, block, linear.buffer, linear.column);
  Rows<const float> w{reinterpret_cast<const float*>(weight.data), weight.strides[0]};
  if (weight.strides[1] != 1 && K > 1) {
    copied_w.resize(size_t(N * K));
    for (int64_t n = n0; n < n1; n++)
      for (int64_t k = 0; k < K; k++) copied_w[n * K + k] = w.data[n * weight.strides[0] + k * weight.strides[1]];
    w = {copied_w.data(), K};
  }
  const float* b = linear.bias < 0 ? nullptr : reinterpret_cast<const float*>(call.bias(linear.bias).data);
  gemm({x.data, x.stride, block.row1 - block.row0, K, w.data, w.stride, b, y.data, y.stride}, n0, n1);
  if (linear.activation != kNoActivation)
    for (int64_t row = 0; row < block.row1 - block.row0; row++) activate(linear.activation, y[row] + n0, n1 - n0);
}

inline void run_copy(const Call& call, const CopyStep& copy, const Block& block) {
  thread_local std::vector<float> copied;
  const Rows<const float> x = source_rows(call, block, copy.x, copy.width, copied);
  const Rows<float> y = buffer_rows(call, block, copy.buffer, copy.column);
  for (int64_t row = 0; row < block.row1 - block.row0; row++) memcpy(y[row], x[row], size_t(copy.width) * sizeof(float));
}

inline void run_product(const Call& call, const ProductStep& product, const Block& block) {
  thread_local std::vector<float> copied_left, copied_right;
  const Rows<const float> left = source_rows(call, block, product.left, product.width, copied_left);
  const Rows<const float> right = source_rows(call, block, product.right, product.width, copied_right);
  const Rows<float> y = buffer_rows(call, block, product.buffer, product.column);
  for (int64_t row = 0; row < block.row1 - block.row0; row++) {
    const float *a = left[row], *b = right[row];
    for (int64_t k = 0, left = product.width; left > 0; k += kLanes, left -= kLanes)
      store_part(y[row] + k, load_part(a + k, left) * load_part(b + k, left), left);
  }
}

inline void run_mixture(const Call& call, const MixtureStep& mixture, const Block& block) {
  thread_local std::vector<float> weights, sum;
  thread_local std::vector<std::vector<float>> copied;
  thread_local std::vector<Rows<const float>> experts;
  const int64_t n = mixture.count, width = mixture.width;
  weights.resize(size_t(n + kLanes));
  sum.resize(size_t(width));
  if (int64_t(copied.size()) <= n) copied.resize(size_t(n) + 1);
  experts.clear();
  for (int64_t i = 0; i < n; i++) experts.push_back(source_rows(call, block, experts_of(mixture)[i], width, copied[i]));
  const Rows<const float> gate = source_rows(call, block, mixture.gate, n, copied[n]);
  const Rows<float> y = buffer_rows(call, block, mixture.buffer, mixture.column);
  for (int64_t row = 0; row < block.row1 - block.row0; row++) {
    for (int64_t i = 0; i < n; i++) weights[i] = gate[row][i];
    if (mixture.softmax) pad_for_softmax(weights.data(), n), softmax(weights.data(), n);
    float* total = sum.data();
    for (int64_t i = 0; i < n; i++) {
      const float* expert = experts[i][row];
      const float weight = weights[i];
      if (i == 0)
        for (int64_t d = 0; d < width; d++) total[d] = weight * expert[d];
      else
        for (int64_t d = 0; d < width; d++) total[d] += weight * expert[d];
    }
    for (int64_t d = 0; d < width; d++) y[row][d] = total[d];
  }
}

static void run(const Call& call, const Step& step, const Block& block, int64_t n0, int64_t n1) {
  switch (step.op) {
    case kLinear: return run_linear(call, static_cast<const LinearStep&>(step), block, n0, n1);
    case kMixture: return run_mixture(call, static_cast<const MixtureStep&>(step), block);
    case kProduct: return run_product(call, static_cast<const ProductStep&>(step), block);
    default: return run_copy(call, static_cast<const CopyStep&>(step), block);
  }
}

extern const Kernels kernels;
const Kernels kernels{&run};

}  // namespace fxopt::towers::FXOPT_ISA
