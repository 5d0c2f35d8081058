// The operator on the CPU: rows over torch's threads.
#include <torch/csrc/stable/ops.h>

#include "../entry.h"
#include "../scratch.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, gru)

static const float* floats_of(const Array& x, int dim, bool dense = true) {
  if (x.dtype != kDtypeFloat || x.dim != dim) refused("fxopt.gru: expected float32 of %d dims", dim);
  if (dense && x.sizes[dim - 1] > 1 && x.strides[dim - 1] != 1) refused("fxopt.gru: expected a dense last dim");
  return reinterpret_cast<const float*>(x.data);
}

static void copy_rows(const Array& x, int64_t first, int64_t rows, float* to) {
  const float* from = reinterpret_cast<const float*>(x.data) + first * x.strides[0];
  for (int64_t m = 0; m < rows; m++)
    for (int64_t j = 0; j < x.sizes[1]; j++) *to++ = from[m * x.strides[0] + j * x.strides[1]];
}

constexpr int64_t kBlock = 48;  // rows whose states stay in the first cache
constexpr double kGrain = 20000;  // multiplications that pay for another thread

// Operands: gates [L, B, 3 H], initial [B, H], weight [3 H, H], bias [3 H] or None.
static void run(const Request& request) {
  if (request.n_operands != 4) refused("fxopt.gru: expected four tensors");
  const Array &gates = request.operands[0], &initial = request.operands[1], &weight = request.operands[2], &bias = request.operands[3];
  const float *from = floats_of(gates, 3), *w = floats_of(weight, 2);
  floats_of(initial, 2, false);  // as the caller has it
  const float* b = bias.is_none() ? nullptr : floats_of(bias, 1);
  const int64_t L = gates.sizes[0], B = gates.sizes[1], H = weight.sizes[1];
  if (gates.sizes[2] != 3 * H || weight.sizes[0] != 3 * H || initial.sizes[0] != B || initial.sizes[1] != H || (!bias.is_none() && bias.sizes[0] != 3 * H))
    refused("fxopt.gru: sizes do not fit %lld units and %lld rows", (long long)H, (long long)B);
  if (L < 1) refused("fxopt.gru: expected at least one step");
  float* states = request.floats({L, B, H});
  if (B == 0 || H == 0) return;
  const auto blocks = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t rows = end - at < kBlock ? end - at : kBlock;
      float* memory = reinterpret_cast<float*>(scratch(size_t(rows * H + scratch_of(rows, H)) * sizeof(float)));
      copy_rows(initial, at, rows, memory);
      chosen->recur({from + at * gates.strides[1], gates.strides[1], gates.strides[0], memory, w, weight.strides[0], b, states + at * H, B * H, rows, L, H, memory + rows * H});
    }
  };
  const int64_t grain = 1 + int64_t(kGrain / (double(L) * 3 * double(H) * double(H)));
  if (B <= grain || torch::stable::get_num_threads() == 1) blocks(0, B);
  else torch::stable::parallel_for(0, B, grain, blocks);
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_gru_run(const fxopt::Request* request) { fxopt::run(*request); }
