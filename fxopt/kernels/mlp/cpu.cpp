// fxopt::mlp on the CPU: rows go through all layers in blocks that stay in a core's cache.
#include <cstring>

#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
#include "resolve.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, mlp)

constexpr int64_t kBlockFloats = 96 << 10;  // of what a block of rows reads and writes in a layer: 384 KB of a 1 MB cache
constexpr int64_t kTile = 12;               // rows of a micro kernel, or two of them
constexpr int64_t kFewest = 96;             // rows of a block: weights are read from beyond the cache for each
constexpr int64_t kMostFloats = 4 << 20;     // of a block: 16 MB a thread stay allocated
constexpr int64_t kVector = 16;
constexpr double kFlopNs = 1 / 200.0, kWeightNs = 4 / 100.0;  // of one core: a multiply-add, a weight from the third cache
constexpr double kPassNs = 0.3;                              // of one core: a number of a gradient
constexpr double kParallelNs = 20000;       // less estimated work than this runs on the calling thread

static double nanoseconds(const Step& step, int64_t rows) {
  const double elements = double(step.N) * double(step.op == kLinear ? step.K : 1);
  return elements * std::max(kWeightNs, 2 * kFlopNs * double(rows));
}

// `rows` rows of `input` from row `row` on, as columns of a dense block.
static void gather(const Array& input, int64_t row, int64_t rows, float* to, int64_t stride) {
  const int32_t last = input.dim - 1;
  const int64_t K = input.sizes[last], step = input.strides[last];
  for (int64_t r = 0; r < rows; r++, to += stride) {
    const float* from = reinterpret_cast<const float*>(input.data);
    int64_t rest = row + r;
    for (int32_t d = last - 1; d >= 0; d--) {
      from += rest % input.sizes[d] * input.strides[d];
      rest /= input.sizes[d];
    }
    if (step == 1) memcpy(to, from, size_t(K) * sizeof(float));
    else for (int64_t k = 0; k < K; k++) to[k] = from[k * step];
  }
}

// The distance between rows that lie evenly, each dense; -1 where they do not.
static int64_t row_stride(const Array& input) {
  const int32_t last = input.dim - 1;
  if (input.sizes[last] > 1 && input.strides[last] != 1) return -1;
  int64_t stride = -1, rows = 1;
  for (int32_t d = last - 1; d >= 0; d--) {
    if (input.sizes[d] == 1) continue;
    if (stride < 0) stride = input.strides[d];
    else if (input.strides[d] != stride * rows) return -1;
    rows *= input.sizes[d];
  }
  return stride < 0 ? input.sizes[last] : stride;
}

// One layer for a few rows, its columns over the threads.
static void linear(const Step& step, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride, bool alone) {
  const auto columns = [&](int64_t n0, int64_t n1) {
    chosen->linear(step, x, x_stride, rows, y, y_stride, n0, n1);
  };
  if (alone || nanoseconds(step, rows) < kParallelNs) return columns(0, step.N);
  const int64_t threads = torch::stable::get_num_threads(), share = ((step.N + threads - 1) / threads + 15) / 16 * 16;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      if (t * share < step.N) columns(t * share, std::min(step.N, (t + 1) * share));
  });
}

// The distance between rows of the input where it can be read as it is; -1 where its rows have to be copied.
static int64_t direct_stride(const Chain& chain) {
  return chain.n_inputs == 1 && chain.steps[0].op == kLinear ? row_stride(chain.inputs[0]) : -1;
}

// Rows begin where a vector may: [1024, 479] x [479, 1024] takes 1.2x as long where they do not.
static int64_t padded(int64_t width) { return width < kVector ? width : (width + kVector - 1) / kVector * kVector; }

struct Rows {
  float* data;
  int64_t stride;
};

// The input of rows [row0, row1), read as it is or copied into `to`.
static Rows input_of(const Chain& chain, int64_t row0, int64_t row1, float* to) {
  if (const int64_t stride = direct_stride(chain); stride >= 0)
    return {reinterpret_cast<float*>(chain.inputs[0].data) + row0 * stride, stride};
  const Rows rows = chain.kept ? Rows{chain.kept + row0 * chain.width, chain.width} : Rows{to, padded(chain.width)};
  int64_t column = 0;
  for (int64_t k = 0; k < chain.n_inputs; k++) {
    gather(chain.inputs[k], row0, row1 - row0, rows.data + column, rows.stride);
    column += chain.inputs[k].sizes[chain.inputs[k].dim - 1];
  }
  return rows;
}

static void copy(Rows from, int64_t rows, int64_t width, Rows to) {
  for (int64_t r = 0; r < rows; r++) memcpy(to.data + r * to.stride, from.data + r * from.stride, size_t(width) * sizeof(float));
}

// Rows [row0, row1) through all steps. alone: on this thread.
static void run_rows(const Chain& chain, float* out, int64_t row0, int64_t row1, bool alone) {
  const int64_t rows = row1 - row0;
  const int64_t floats = rows * padded(chain.widest);
  float* const memory = reinterpret_cast<float*>(scratch(size_t(2 * floats) * sizeof(float)));
  float* const side[2] = {memory, memory + floats};  // blocks of rows that take turns
  Rows x = input_of(chain, row0, row1, side[0]);
  if (rows >= kTile && x.stride % kVector && chain.width > kVector && direct_stride(chain) >= 0) {
    const Rows aligned{side[0], padded(chain.width)};
    copy(x, rows, chain.width, aligned);
    x = aligned;
  }
  int turn = 1;
  for (int64_t s = 0; s < int64_t(chain.steps.size()); s++) {
    const Step& step = chain.steps[s];
    if (step.op != kLinear) {
      chosen->pointwise(step, x.data, rows, x.stride);
      continue;
    }
    Rows y{side[turn], padded(step.N)};
    if (s == chain.last_linear) y = {out + row0 * step.N, step.N};
    else if (step.after) y = {step.after + row0 * step.N, step.N};
    const Rows first = step.before ? Rows{step.before + row0 * step.N, step.N} : y;
    linear(step, x.data, x.stride, rows, first.data, first.stride, alone);
    if (first.data != y.data) copy(first, rows, step.N, y);
    x = y;
    turn ^= 1;
  }
}

static void run_all(const Chain& chain, float* out) {
  const int64_t threads = torch::stable::get_num_threads();
  double work = 0;
  for (const Step& step : chain.steps) work += nanoseconds(step, chain.rows);
  const bool parallel = threads > 1 && work > kParallelNs;
  if (chain.rows < 2 * kTile * (parallel ? threads : 1)) return run_rows(chain, out, 0, chain.rows, !parallel);
  const int64_t block = std::max(kBlockFloats / (chain.both + 1), std::min(kFewest, kMostFloats / (chain.both + 1)));
  const int64_t tiles = (chain.rows + kTile - 1) / kTile, in_block = std::max<int64_t>(1, block / kTile);
  const int64_t each = parallel ? threads : 1;  // as many blocks for each thread, of as many tiles
  const int64_t blocks = std::min(tiles, (tiles + in_block * each - 1) / (in_block * each) * each);
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++)
      run_rows(chain, out, b * tiles / blocks * kTile, std::min(chain.rows, (b + 1) * tiles / blocks * kTile), true);
  };
  in_parts(blocks, parallel ? 1 : blocks, run);
}

// More outputs, for a gradient: the input where its rows are copied, and of every linear layer what it gave and what
// became of it before the next one.
static void keep(const Request& request, Chain& chain) {
  const auto allocate = [&](int64_t width) { return request.floats({chain.rows, width}); };
  if (direct_stride(chain) < 0) chain.kept = allocate(chain.width);
  for (int64_t s = 0; s < int64_t(chain.steps.size()); s++) {
    Step& step = chain.steps[s];
    if (step.op != kLinear) continue;
    if (step.a != 0) step.before = allocate(step.N);
    if (s != chain.last_linear) step.after = allocate(step.N);
  }
}

static void run(const Request& request) {
  thread_local Chain chain;  // keeps its memory between calls
  resolve(request, chain);
  const Array& first = chain.inputs[0];
  std::vector<int64_t> sizes(first.sizes, first.sizes + first.dim);
  sizes.back() = chain.outputs();
  float* out = reinterpret_cast<float*>(request.allocate(request.context, first.dim, sizes.data(), kDtypeFloat));
  if (chain.keeps) keep(request, chain);
  if (chain.rows > 0) run_all(chain, out);
}

static const float* matrix(const Array& x, int64_t M, int64_t N, int64_t& stride) {
  if (x.dim != 2 || x.dtype != kDtypeFloat || x.sizes[0] != M || x.sizes[1] != N || (M > 0 && N > 1 && x.strides[1] != 1))
    refused("fxopt.linear_backward: expected float32 matrices of one shape, their rows dense");
  stride = x.strides[0];
  return reinterpret_cast<const float*>(x.data);
}

// Operands: the gradient, and the result of the step behind the layer or None. Words: which step that is.
static void run_gradient(const Request& request) {
  if (request.n_operands != 2 || request.n_words != 1) refused("fxopt.linear_backward: expected a gradient and a result");
  const Array &grad = request.operands[0], &y = request.operands[1];
  Gradient g{};
  g.op = y.is_none() ? kLinear : Op(request.words[0]);
  if (!y.is_none() && g.op != kRelu && g.op != kSigmoid && g.op != kTanh) refused("fxopt.linear_backward: no step %lld", (long long)g.op);
  if (grad.dim == 2) g.M = grad.sizes[0], g.N = grad.sizes[1];
  g.grad = matrix(grad, g.M, g.N, g.grad_stride);
  if (!y.is_none()) g.y = matrix(y, g.M, g.N, g.y_stride), g.through = request.floats({g.M, g.N});
  g.turned = request.floats({g.N, g.M});
  g.sums = request.floats({g.N});
  const int64_t group = 2 * kVector, groups = (g.N + group - 1) / group;
  const auto columns = [&](int64_t first, int64_t last) { chosen->gradient(g, first * group, std::min(g.N, last * group)); };
  in_parts(groups, double(g.M) * double(g.N) * kPassNs < kParallelNs ? groups : 1, columns);
}

}  // namespace fxopt

// For entry.cpp, which is another library, and for tests: which instruction set runs ("avx512", "avx2", "scalar").
FXOPT_EXPORT void fxopt_mlp_run(const fxopt::Request* request) { fxopt::run(*request); }
FXOPT_EXPORT void fxopt_linear_backward_run(const fxopt::Request* request) { fxopt::run_gradient(*request); }
