// The operator on the CPU: tensors into Vectors, then the kernel of compress.h over torch's threads.
#include <cstring>
#include <vector>

#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, compressed_interaction)

static float* floats(int64_t count) { return reinterpret_cast<float*>(scratch(size_t(count) * sizeof(float))); }

constexpr int64_t kWidth = 192;        // numbers of a field at a time: 250 of them, and the sums, in the second cache
constexpr int64_t kFewRows = 64;       // numbers, below which folding the weights costs more than it saves
constexpr double kTaskFlops = 1000000;  // less work than this is not worth another thread

static Vectors vectors_of(const Array& x) {
  if (x.dtype != kDtypeFloat || x.dim != 3) refused("fxopt.compressed_interaction: expected float32 vectors [B, F, D]");
  return {reinterpret_cast<const float*>(x.data), x.sizes[1], x.strides[0], x.strides[1], x.strides[2]};
}

// w[h, m] and w[m, h] multiply the same product where x is y.
static void fold(Compressed& c, std::vector<float>& memory) {
  const int64_t F = c.y.F, K = F * (F + 1) / 2;
  memory.resize(size_t(c.O * K));
  float* to = memory.data();
  for (int64_t o = 0; o < c.O; o++)
    for (int64_t h = 0; h < F; h++) {
      const float* w = c.weight + o * c.stride;
      *to++ = w[h * F + h];
      for (int64_t m = h + 1; m < F; m++) *to++ = w[h * F + m] + w[m * F + h];
    }
  c.weight = memory.data(), c.stride = c.K = K, c.folded = true;
}

static void make_dense(Compressed& c, const Array& weight, std::vector<float>& memory) {
  memory.resize(size_t(c.O * c.K));
  for (int64_t o = 0; o < c.O; o++)
    for (int64_t k = 0; k < c.K; k++) memory[o * c.K + k] = c.weight[o * weight.strides[0] + k * weight.strides[1]];
  c.weight = memory.data(), c.stride = c.K;
}

static bool same(const Vectors& x, const Vectors& y) {
  return x.data == y.data && x.F == y.F && x.row == y.row && x.field == y.field && x.lane == y.lane;
}

// Operands: x, y, weight.
static void run(const Request& request) {
  if (request.n_operands != 3) refused("fxopt.compressed_interaction: expected x, y and weight");
  const Array &x = request.operands[0], &y = request.operands[1], &w = request.operands[2];
  Compressed c{vectors_of(x), vectors_of(y), reinterpret_cast<const float*>(w.data)};
  if (x.sizes[0] != y.sizes[0] || x.sizes[2] != y.sizes[2]) refused("fxopt.compressed_interaction: vectors of different batch or size");
  if (w.dtype != kDtypeFloat || w.dim != 2 || w.sizes[1] != product(c.x.F, c.y.F))
    refused("fxopt.compressed_interaction: expected a float32 weight [O, %lld]", (long long)(c.x.F * c.y.F));
  c.O = w.sizes[0], c.K = w.sizes[1], c.stride = w.strides[0], c.D = x.sizes[2], c.folded = false;
  const int64_t B = x.sizes[0];
  c.out = request.floats({B, c.O, c.D});
  if (B == 0 || c.O == 0 || c.D == 0) return;
  std::vector<float> dense, folded;
  if (w.strides[1] != 1) make_dense(c, w, dense);
  if (same(c.x, c.y) && B * c.D >= kFewRows) fold(c, folded);
  const int64_t rows = c.D < kWidth ? kWidth / c.D : 1, chunks = (B + rows - 1) / rows;
  const int64_t threads = torch::stable::get_num_threads(), parts = chunks < 2 * threads && c.O >= 16 * threads ? threads : 1;
  const int64_t outputs = (c.O + parts - 1) / parts;
  const auto tasks = [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; task++) {
      const int64_t b = task / parts * rows, o = task % parts * outputs;
      chosen->compress(c, b, b + rows < B ? b + rows : B, o, o + outputs < c.O ? o + outputs : c.O, floats);
    }
  };
  const double flops = 2.0 * double(rows < B ? rows : B) * double(c.D * c.K * outputs);
  in_parts(chunks * parts, int64_t(kTaskFlops / (flops + 1)) + 1, tasks);
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_compressed_interaction_run(const fxopt::Request* request) { fxopt::run(*request); }
