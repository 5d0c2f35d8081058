// Rows on torch's threads, each updated where it lies. One source for every CPU: what limits is memory.
#include <torch/csrc/stable/library.h>

#include <cmath>

#include "../dispatched.h"
#include "../refused.h"
#include "../simd/cpu.h"
#include "../threads.h"
#include "layout.h"

namespace fxopt {

constexpr int64_t kAhead = 8;  // rows of prefetch
constexpr int kLanes = 8;

template <class A>
static void fetch(const A* row, int64_t dim) {
  for (int64_t d = 0; d < dim && d < 512; d += 64 / int64_t(sizeof(A))) __builtin_prefetch(row + d, 1);
}

// Sum of squares in eight partial sums, whatever vectors the CPU has.
template <class A>
static A squares(const A* grad, int64_t dim) {
  A sums[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    for (int l = 0; l < kLanes; l++) sums[l] += grad[d + l] * grad[d + l];
  for (; d < dim; d++) sums[0] += grad[d] * grad[d];
  for (int l = 1; l < kLanes; l++) sums[0] += sums[l];
  return sums[0];
}

template <class A>
static bool is_zero(const A* grad, int64_t dim) {
  int any = 0;
  for (int64_t d = 0; d < dim; d++) any |= grad[d] != 0;
  return !any;
}

template <class A>
static void sgd(const Rates<A>& by, const Rows<A>& u, A* __restrict row, const A* __restrict grad, int64_t) {
  for (int64_t d = 0; d < u.dim; d++) row[d] -= by.rate * grad[d];
}

template <class A>
static void rowwise_adagrad(const Rates<A>& by, const Rows<A>& u, A* __restrict row, const A* __restrict grad, int64_t r) {
  u.first[r] += squares(grad, u.dim) / A(u.dim);
  const A rate = by.rate / (std::sqrt(u.first[r]) + by.eps);
  for (int64_t d = 0; d < u.dim; d++) row[d] -= rate * grad[d];
}

template <class A>
static void adam(const Rates<A>& by, const Rows<A>& u, A* __restrict row, const A* __restrict grad, int64_t r) {
  A *__restrict m = u.first + r * u.dim, *__restrict v = u.second + r * u.dim;
  for (int64_t d = 0; d < u.dim; d++) {
    m[d] = by.beta1 * m[d] + by.gain1 * grad[d];
    v[d] = by.beta2 * v[d] + by.gain2 * grad[d] * grad[d];
    row[d] -= by.rate * m[d] / (std::sqrt(v[d]) / by.root + by.eps);
  }
}

template <class A>
using Step = void (*)(const Rates<A>&, const Rows<A>&, A*, const A*, int64_t);

template <class A, Step<A> STEP>
static void update(const Rates<A>& by, const Rows<A>& u) {
  const auto some = [&](int64_t from, int64_t to) {
    for (int64_t k = from; k < to; k++) {
      if (k + kAhead < to) {
        const int64_t next = u.rows[k + kAhead];
        fetch(u.table + next * u.dim, u.dim);
        if (STEP == rowwise_adagrad<A>) fetch(u.first + next, 1);
        if (STEP == adam<A>) fetch(u.first + next * u.dim, u.dim), fetch(u.second + next * u.dim, u.dim);
      }
      const A* grad = u.grads + k * u.dim;
      if (!is_zero(grad, u.dim)) STEP(by, u, u.table + u.rows[k] * u.dim, grad, u.rows[k]);
    }
  };
  in_parts(u.n, 1 + 32768 / (u.dim + 1), some);
}

static Array checked(const Tensor& tensor, int dtype, std::initializer_list<int64_t> sizes, const char* what) {
  const Array operand = operand_of(tensor);
  bool fits = operand.dtype == dtype && operand.dim == int(sizes.size()) && tensor.is_contiguous();
  for (int d = 0; fits && d < operand.dim; d++) fits = operand.sizes[d] == sizes.begin()[d];
  if (!fits) refused("fxopt.row_update: %s does not fit the table", what);
  return operand;
}

// The rows of one table, of whose state the first tensor is `state`.
template <class A>
static Rows<A> rows_of(const Tensor& table, const Tensor* state, const Tensor& rows, const Tensor& grads, int64_t kind) {
  const Array to = operand_of(table);
  if (to.dim != 2 || !table.is_contiguous() || operand_of(rows).dim != 1) refused("fxopt.row_update: expected a contiguous table [R, D] and rows [n]");
  const int64_t n = operand_of(rows).sizes[0], R = to.sizes[0], D = to.sizes[1];
  const auto data = [&](const Tensor& tensor, std::initializer_list<int64_t> sizes, const char* what) {
    return reinterpret_cast<A*>(checked(tensor, sizeof(A) == 4 ? kDtypeFloat : kDtypeDouble, sizes, what).data);
  };
  Rows<A> u{data(table, {R, D}, "the table"), nullptr, nullptr, nullptr, nullptr, n, D, R};
  u.rows = reinterpret_cast<const int64_t*>(checked(rows, kDtypeInt64, {n}, "the list of rows").data);
  u.grads = data(grads, {n, D}, "the gradient");
  for (int64_t k = 0; k < n; k++)
    if (u.rows[k] < 0 || u.rows[k] >= R || (k > 0 && u.rows[k] <= u.rows[k - 1])) refused("fxopt.row_update: expected growing rows below %lld", (long long)R);
  if (kind == kRowwiseAdagrad) u.first = data(state[0], {R}, "the state");
  if (kind == kAdam) u.first = data(state[0], {R, D}, "the state"), u.second = data(state[1], {R, D}, "the state");
  return u;
}

using Tensors = std::vector<Tensor>;

template <class A>
static void run(const Tensors& tables, const Tensors& state, const Tensors& rows, const Tensors& grads, const double* c, int64_t kind) {
  const Rates<A> by{A(c[0]), A(c[1]), A(c[2]), A(c[3]), A(1 - c[2]), A(1 - c[3]), A(c[4])};
  const size_t states = kind == kSgd ? 0 : kind == kAdam ? 2 : 1, n = tables.size();
  if (state.size() != n * states) refused("fxopt.row_update: %lld tensors of state", (long long)state.size());
  if (rows.size() != n || grads.size() != n) refused("fxopt.row_update: expected rows and a gradient for each table");
  std::vector<Rows<A>> each;
  for (size_t t = 0; t < n; t++) each.push_back(rows_of<A>(tables[t], state.data() + t * states, rows[t], grads[t], kind));
  const auto step = kind == kSgd ? update<A, sgd<A>> : kind == kAdam ? update<A, adam<A>> : update<A, rowwise_adagrad<A>>;
  for (const Rows<A>& u : each) step(by, u);
}

static void row_update(const Tensors tables, const Tensors state, const Tensors rows, const Tensors grads, const Tensor constants, int64_t kind) {
  const auto* numbers = reinterpret_cast<const double*>(checked(constants, kDtypeDouble, {5}, "the list of constants").data);
  if (kind < kSgd || kind > kAdam) refused("fxopt.row_update: no kind %lld", (long long)kind);
  if (tables.empty()) return;
  const int dtype = operand_of(tables[0]).dtype;
  if (dtype == kDtypeFloat) run<float>(tables, state, rows, grads, numbers, kind);
  else if (dtype == kDtypeDouble) run<double>(tables, state, rows, grads, numbers, kind);
  else refused("fxopt.row_update: expected a table in float32 or float64");
}

}  // namespace fxopt

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, m) { m.impl("row_update", TORCH_BOX(&fxopt::row_update)); }
