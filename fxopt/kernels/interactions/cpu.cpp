// The operators on the CPU: tensors into Fields and Runs, then the kernels over torch's threads.
#include <cstring>
#include <vector>

#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, interactions)

static float* floats(int64_t count) { return reinterpret_cast<float*>(scratch(size_t(count) * sizeof(float))); }

constexpr int64_t kMostVectors = 1 << 15, kMostPairs = int64_t(1) << 30;  // their Gram matrix, and a Run's numbers
constexpr double kTaskNs = 10000;  // less work than this is not worth another thread

template <class Rows>
static void over_rows(int64_t B, double ns_a_row, const Rows& rows) {
  in_parts(B, int64_t(kTaskNs / ns_a_row) + 1, rows);
}

// The tensors [B, F, D] or [B, D] of a list, one after the other on F.
struct FieldList {
  std::vector<float*> data;
  std::vector<int64_t> row, lane;
  int64_t B = 0, D = 0;

  void add(const Array& x) {
    if (x.dtype != kDtypeFloat || (x.dim != 2 && x.dim != 3)) refused("fxopt.dot_interaction: expected float32 vectors [B, F, D] or [B, D]");
    const int64_t last = x.dim - 1, count = x.dim == 3 ? x.sizes[1] : 1;
    if (row.empty() && B == 0 && D == 0) B = x.sizes[0], D = x.sizes[last];
    if (x.sizes[0] != B || x.sizes[last] != D) refused("fxopt.dot_interaction: vectors of different batch or size");
    if (count > kMostVectors - int64_t(row.size())) refused("fxopt.dot_interaction: more than %lld vectors", (long long)kMostVectors);
    for (int64_t f = 0; f < count; f++) {
      data.push_back(reinterpret_cast<float*>(x.data) + (x.dim == 3 ? f * x.strides[1] : 0));
      row.push_back(x.strides[0]);
      lane.push_back(x.strides[last]);
    }
  }

  Fields fields() const { return {data.data(), row.data(), lane.data(), B, int64_t(data.size()), D}; }
};

static int64_t index_at(const Array& index, int64_t k, int64_t F) {
  const int64_t value = reinterpret_cast<const int64_t*>(index.data)[k * index.strides[0]];
  if (value < -F || value >= F) refused("fxopt.dot_interaction: index %lld is out of bounds for %lld vectors", (long long)value, (long long)F);
  return value < 0 ? value + F : value;
}

// The pairs as runs of neighbours, in the order of the results. A pair may stand either way round.
static void append_runs(const Array& i, const Array& j, int64_t F, std::vector<Run>& runs) {
  if (i.dtype != kDtypeInt64 || j.dtype != kDtypeInt64 || i.dim != 1 || j.dim != 1 || i.sizes[0] != j.sizes[0])
    refused("fxopt.dot_interaction: expected two int64 lists of equal length");
  if (i.sizes[0] > kMostPairs) refused("fxopt.dot_interaction: more than %lld pairs", (long long)kMostPairs);
  for (int64_t k = 0; k < i.sizes[0]; k++) {
    const int32_t left = int32_t(index_at(i, k, F)), right = int32_t(index_at(j, k, F));
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.i == left && last.j + last.count == right) { last.count++; continue; }
      if (last.i == right && last.j + last.count == left) { last.count++; continue; }
      if (last.count == 1 && last.j == right && last.i + 1 == left) { last = {right, last.i, 2, last.at}; continue; }
    }
    runs.push_back({left, right, 1, int32_t(k)});
  }
}

static double ns_a_row(const Fields& x, int64_t results) { return 50 + double(x.F * x.F * x.D) / 40 + double(results) / 4; }

// What stands beside the results in their rows.
struct Copy {
  const Array* from;
  int64_t at;
};

static void copy_beside(const Copy& copy, float* out, int64_t width, int64_t row0, int64_t row1) {
  const Array& x = *copy.from;
  if (x.sizes[1] == 0) return;
  for (int64_t b = row0; b < row1; b++) {
    const float* from = reinterpret_cast<const float*>(x.data) + b * x.strides[0];
    float* to = out + b * width + copy.at;
    if (x.strides[1] == 1) memcpy(to, from, size_t(x.sizes[1]) * sizeof(float));
    else for (int64_t k = 0; k < x.sizes[1]; k++) to[k] = from[k * x.strides[1]];
  }
}

static int64_t place(const Array* beside, int64_t count, int64_t B, int64_t at, std::vector<Copy>& copies) {
  for (int64_t k = 0; k < count; k++) {
    if (beside[k].dtype != kDtypeFloat || beside[k].dim != 2 || beside[k].sizes[0] != B)
      refused("fxopt.dot_interaction: what stands beside the results must be float32 [B, W]");
    copies.push_back({beside + k, at});
    at += beside[k].sizes[1];
  }
  return at;
}

// Arguments: the vectors, what stands before the results, and behind; the lists i and j.
static void run_dot(const Request& request) {
  if (request.n_arguments != 5 || request.counts[0] < 1 || request.counts[3] != 1 || request.counts[4] != 1)
    refused("fxopt.dot_interaction: expected vectors, what stands beside the results, and two lists");
  FieldList list;
  for (int64_t k = 0; k < request.counts[0]; k++) list.add(request.operands[k]);
  const Array *before = request.argument(1), *after = request.argument(2), *index = request.argument(3);
  thread_local std::vector<Run> runs;
  runs.clear();
  const Fields x = list.fields();
  append_runs(index[0], index[1], x.F, runs);
  std::vector<Copy> copies;
  const int64_t n = index[0].sizes[0], at = place(before, request.counts[1], x.B, 0, copies);
  const int64_t width = place(after, request.counts[2], x.B, at + n, copies);
  float* out = request.floats({x.B, width});
  const Dot job{x, runs.data(), int64_t(runs.size()), n, out + at, width};
  over_rows(x.B, ns_a_row(x, width), [&](int64_t row0, int64_t row1) {
    chosen->dot(job, row0, row1, floats);
    for (const Copy& copy : copies) copy_beside(copy, out, width, row0, row1);
  });
}

// words: where the results begin in the rows of the gradient. Operands: it, the lists i and j, the vectors.
static void run_dot_backward(const Request& request) {
  if (request.n_words != 1 || request.n_operands < 4) refused("fxopt.dot_interaction_backward: expected a gradient, two lists and vectors");
  const Array& grad = request.operands[0];
  FieldList list, grads;
  for (int64_t k = 3; k < request.n_operands; k++) {
    const Array& x = request.operands[k];
    list.add(x);
    const int64_t last = x.dim - 1, row = x.sizes[last] * (x.dim == 3 ? x.sizes[1] : 1);
    const int64_t strides[3] = {row, x.dim == 3 ? x.sizes[last] : 1, 1};
    grads.add({request.allocate(request.context, x.dim, x.sizes, kDtypeFloat), x.sizes, strides, x.dim, kDtypeFloat});
  }
  const Fields x = list.fields();
  std::vector<Run> runs;
  append_runs(request.operands[1], request.operands[2], x.F, runs);
  const int64_t at = request.words[0];
  if (grad.dtype != kDtypeFloat || grad.dim != 2 || grad.sizes[0] != x.B || at < 0 || at > grad.sizes[1] - request.operands[1].sizes[0])
    refused("fxopt.dot_interaction_backward: the gradient does not fit");
  if (grad.strides[1] != 1 && grad.sizes[1] > 1 && x.B > 0) refused("fxopt.dot_interaction_backward: the gradient's rows must be contiguous");
  const DotBackward job{x, grads.fields(), runs.data(), int64_t(runs.size()), reinterpret_cast<float*>(grad.data) + at, grad.strides[0]};
  over_rows(x.B, 2 * ns_a_row(x, grad.sizes[1]), [&](int64_t row0, int64_t row1) { chosen->dot_backward(job, row0, row1, floats); });
}

// Operands: x [B, F, D], weights [B, F] or [B, F, 1] or None. words: the scale's bits, and whether lanes are summed.
static PairSum pair_sum_of(const Array& x, const Array& weights, const int64_t* words, FieldList& list) {
  list.add(x);
  PairSum job{list.fields(), nullptr, 0, 0, 0, words[1] != 0, nullptr};
  double scale;
  memcpy(&scale, &words[0], sizeof scale);
  job.scale = float(scale);
  if (!weights.is_none()) {
    const bool fits = weights.dim == 2 || (weights.dim == 3 && weights.sizes[2] == 1);
    if (weights.dtype != kDtypeFloat || !fits || weights.sizes[0] != job.x.B || weights.sizes[1] != job.x.F)
      refused("fxopt.pair_sum: expected float32 weights [B, F] or [B, F, 1]");
    job.weights = reinterpret_cast<const float*>(weights.data);
    job.weights_row = weights.strides[0], job.weights_field = weights.strides[1];
  }
  return job;
}

static void run_pair_sum(const Request& request) {
  if (request.n_words != 2 || request.n_operands != 2) refused("fxopt.pair_sum: expected vectors and weights");
  FieldList list;
  PairSum job = pair_sum_of(request.operands[0], request.operands[1], request.words, list);
  job.out = request.floats({job.x.B, job.total ? 1 : job.x.D});
  over_rows(job.x.B, 10 + double(job.x.F * job.x.D) / 8, [&](int64_t row0, int64_t row1) { chosen->pair_sum(job, row0, row1); });
}

// Operands: the gradient, x, weights. Outputs: the gradient of x and, where there are weights, theirs.
static void run_pair_sum_backward(const Request& request) {
  if (request.n_words != 2 || request.n_operands != 3) refused("fxopt.pair_sum_backward: expected a gradient, vectors and weights");
  const Array &grad = request.operands[0], &x = request.operands[1], &weights = request.operands[2];
  FieldList list;
  PairSumBackward job{pair_sum_of(x, weights, request.words, list), reinterpret_cast<const float*>(grad.data), 0, 0, nullptr, nullptr};
  const Fields& fields = job.forward.x;
  if (grad.dtype != kDtypeFloat || grad.dim != 2 || grad.sizes[0] != fields.B || grad.sizes[1] != (job.forward.total ? 1 : fields.D))
    refused("fxopt.pair_sum_backward: the gradient does not fit");
  job.grad_row = grad.strides[0], job.grad_lane = grad.strides[1];
  job.grad_x = reinterpret_cast<float*>(request.allocate(request.context, x.dim, x.sizes, kDtypeFloat));
  if (!weights.is_none()) job.grad_weights = reinterpret_cast<float*>(request.allocate(request.context, weights.dim, weights.sizes, kDtypeFloat));
  over_rows(fields.B, 10 + double(fields.F * fields.D) / 4, [&](int64_t row0, int64_t row1) { chosen->pair_sum_backward(job, row0, row1); });
}

// Floats [m, n] of a matrix, or [n] of a vector where m is 1, turned over and filled up with 0 to [n, wide].
static std::vector<float> turned(const Array& from, int64_t m, int64_t n, int64_t wide) {
  std::vector<float> to(n * wide);
  if (from.is_none()) return to;
  const int64_t last = from.dim - 1;
  const bool fits = from.dtype == kDtypeFloat && ((from.dim == 2 && from.sizes[0] == m) || (from.dim == 1 && m == 1)) && from.sizes[last] == n;
  if (!fits) refused("fxopt.pair_attention: weights of another shape");
  for (int64_t row = 0; row < m; row++)
    for (int64_t k = 0; k < n; k++)
      to[k * wide + row] = reinterpret_cast<const float*>(from.data)[(from.dim == 2 ? row * from.strides[0] : 0) + k * from.strides[last]];
  return to;
}

// Operands: x [B, F, D], i, j, weight [A, D], bias [A] or None, query [1, A], its bias or None, which changes no softmax.
static void run_attention(const Request& request) {
  if (request.n_operands != 7) refused("fxopt.pair_attention: expected vectors, pairs and weights");
  const Array* operand = request.operands;
  FieldList list;
  list.add(operand[0]);
  Attention job{list.fields()};
  std::vector<Run> runs;
  append_runs(operand[1], operand[2], job.x.F, runs);
  job.runs = runs.data(), job.n_runs = int64_t(runs.size()), job.n = operand[1].sizes[0];
  if (operand[3].dim != 2 || operand[5].dim != 2 || operand[4].dim > 1 || job.n == 0)
    refused("fxopt.pair_attention: expected weights [A, D] and [1, A], and a pair");
  job.A = operand[3].sizes[0], job.units = (job.A + kUnits - 1) / kUnits * kUnits;
  const std::vector<float> weight = turned(operand[3], job.A, job.x.D, job.units);
  std::vector<float> bias = turned(operand[4], 1, job.A, 1), query = turned(operand[5], 1, job.A, 1);
  bias.resize(job.units), query.resize(job.units);
  job.weight = weight.data(), job.bias = bias.data(), job.query = query.data();
  job.pooled = request.floats({job.x.B, job.x.D});
  job.scores = request.floats({job.x.B, job.n});
  const double ns = 50 + double(job.n * job.units * job.x.D) / 60;
  over_rows(job.x.B, ns, [&](int64_t row0, int64_t row1) { chosen->attention(job, row0, row1, floats); });
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_dot_interaction_run(const fxopt::Request* request) { fxopt::run_dot(*request); }
FXOPT_EXPORT void fxopt_dot_interaction_backward_run(const fxopt::Request* request) { fxopt::run_dot_backward(*request); }
FXOPT_EXPORT void fxopt_pair_sum_run(const fxopt::Request* request) { fxopt::run_pair_sum(*request); }
FXOPT_EXPORT void fxopt_pair_sum_backward_run(const fxopt::Request* request) { fxopt::run_pair_sum_backward(*request); }
FXOPT_EXPORT void fxopt_pair_attention_run(const fxopt::Request* request) { fxopt::run_attention(*request); }
