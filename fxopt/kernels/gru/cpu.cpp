// The operator on the CPU: rows over torch's threads.
#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
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

static const float* bias_of(const Array& bias) { return bias.is_none() ? nullptr : floats_of(bias, 1); }

// Whether gates of `wide` numbers, and the rest, are those of `rows` rows.
static void demand_sizes(int64_t wide, const Array& initial, const Array& weight, const Array& bias, int64_t rows) {
  const int64_t units = weight.sizes[1];
  if (wide != 3 * units || weight.sizes[0] != 3 * units || initial.sizes[0] != rows || initial.sizes[1] != units || (!bias.is_none() && bias.sizes[0] != 3 * units))
    refused("fxopt.gru: sizes do not fit %lld units and %lld rows", (long long)units, (long long)rows);
}

// All rows, some at a time: `of(first, rows)` is their recurrence, but for the memory of the call.
template <class Of>
static void recur_all(int64_t rows, int64_t steps, int64_t units, const Array& initial, const Of& of) {
  const auto blocks = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kBlock) {
      Recurrence r = of(at, end - at < kBlock ? end - at : kBlock);
      float* memory = reinterpret_cast<float*>(scratch(size_t(r.rows * units + scratch_of(r.rows, units)) * sizeof(float)));
      copy_rows(initial, at, r.rows, memory);
      r.initial = memory;
      r.scratch = memory + r.rows * units;
      chosen->recur(r);
    }
  };
  in_parts(rows, 1 + int64_t(kGrain / (double(steps) * 3 * double(units) * double(units))), blocks);
}

// Operands: gates [L, B, 3 H], initial [B, H], weight [3 H, H], bias [3 H] or None.
static void run(const Request& request) {
  if (request.n_operands != 4) refused("fxopt.gru: expected four tensors");
  const Array &gates = request.operands[0], &initial = request.operands[1], &weight = request.operands[2], &bias = request.operands[3];
  const float *from = floats_of(gates, 3), *w = floats_of(weight, 2), *b = bias_of(bias);
  floats_of(initial, 2, false);  // as the caller has it
  const int64_t L = gates.sizes[0], B = gates.sizes[1], H = weight.sizes[1];
  demand_sizes(gates.sizes[2], initial, weight, bias, B);
  if (L < 1) refused("fxopt.gru: expected at least one step");
  float* states = request.floats({L, B, H});
  if (B == 0 || H == 0) return;
  recur_all(B, L, H, initial, [&](int64_t at, int64_t rows) {
    return Recurrence{from + at * gates.strides[1], gates.strides[1], gates.strides[0], w, weight.strides[0], b, states + at * H, B * H, rows, L, H};
  });
}

// Of packed sequences: how many begin. Each step has one row or more, and no more than the one before it.
static int64_t demand_sequences(const Array& batch_sizes, int64_t count) {
  const auto* sizes = reinterpret_cast<const int64_t*>(batch_sizes.data);
  if (batch_sizes.dtype != kDtypeInt64 || batch_sizes.dim != 1 || batch_sizes.sizes[0] < 1 || (batch_sizes.sizes[0] > 1 && batch_sizes.strides[0] != 1))
    refused("fxopt.packed_gru: expected the number of rows of each step");
  int64_t left = count;
  for (int64_t t = 0; t < batch_sizes.sizes[0]; t++) {
    if (sizes[t] < 1 || sizes[t] > left || (t && sizes[t] > sizes[t - 1])) refused("fxopt.packed_gru: %lld rows at step %lld", (long long)sizes[t], (long long)t);
    left -= sizes[t];
  }
  if (left) refused("fxopt.packed_gru: %lld rows are of no step", (long long)left);
  return sizes[0];
}

// Operands: gates [N, 3 H], batch_sizes [L], initial [B, H], weight [3 H, H], bias [3 H] or None.
static void run_packed(const Request& request) {
  if (request.n_operands != 5) refused("fxopt.packed_gru: expected five tensors");
  const Array &gates = request.operands[0], &batch_sizes = request.operands[1], &initial = request.operands[2], &weight = request.operands[3], &bias = request.operands[4];
  const float *from = floats_of(gates, 2), *w = floats_of(weight, 2), *b = bias_of(bias);
  floats_of(initial, 2, false);
  const int64_t N = gates.sizes[0], B = demand_sequences(batch_sizes, N), L = batch_sizes.sizes[0], H = weight.sizes[1];
  demand_sizes(gates.sizes[1], initial, weight, bias, B);
  float *states = request.floats({N, H}), *last = request.floats({B, H});
  if (H == 0) return;
  const auto* sizes = reinterpret_cast<const int64_t*>(batch_sizes.data);
  recur_all(B, L, H, initial, [&](int64_t at, int64_t rows) {
    return Recurrence{from + at * gates.strides[0], gates.strides[0], 0, w, weight.strides[0], b, states + at * H, 0, rows, L, H, sizes, at, last + at * H};
  });
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_gru_run(const fxopt::Request* request) { fxopt::run(*request); }
FXOPT_EXPORT void fxopt_packed_gru_run(const fxopt::Request* request) { fxopt::run_packed(*request); }
