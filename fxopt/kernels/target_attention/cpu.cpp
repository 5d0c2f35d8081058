// fxopt::target_attention on the CPU: torch's stable ABI around the kernels of tile.h.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
#include "../words.h"
#include "job.h"

namespace fxopt::target {

constexpr int64_t kVersion = 0x46584F540002;
constexpr double kParallelFlops = 2e6;  // 30 us on one thread; less is not worth waking another

FXOPT_CHOSEN(run, target_attention)

static void check(bool holds, const char* what) {
  if (!holds) refused("fxopt.target_attention: expected %s", what);
}

// Memory of one call, in pieces that start at cache lines.
class Arena {
 public:
  float* take(int64_t floats) {
    blocks_.emplace_back(floats + 32);
    float* data = blocks_.back().data();
    return data + (64 - reinterpret_cast<uintptr_t>(data) % 64) / 4;
  }

 private:
  std::vector<std::vector<float>> blocks_;
};

struct Matrix { const float* data; int64_t rows, columns, row, column; };

static const float* floats(const Array& operand) { return reinterpret_cast<const float*>(operand.data); }

static Matrix matrix(const Array& operand) {
  check(operand.dim == 2 && operand.dtype == kDtypeFloat, "float32 matrices as weights");
  return {floats(operand), operand.sizes[0], operand.sizes[1], operand.strides[0], operand.strides[1]};
}

// packed[k][n] += scale * weight[n][start + k]
static void pack(const Matrix& weight, int64_t start, int64_t K, float scale, float* packed) {
  check(start >= 0 && start <= weight.columns - K, "terms inside of the weight");
  const int64_t ld = padded(weight.rows);
  for (int64_t k0 = 0; k0 < K; k0 += 16)
    for (int64_t n = 0; n < weight.rows; n++)
      for (int64_t k = k0; k < std::min(k0 + 16, K); k++)
        packed[k * ld + n] += scale * weight.data[n * weight.row + (start + k) * weight.column];
}

// A parameter as a vector of channels; one number stands for all of them.
static const float* vector_of(const Array& operand, int64_t channels, int64_t length, Arena& arena) {
  int64_t n = 1, stride = 1;
  for (int32_t d = 0; d < operand.dim; d++) {
    check(n == 1 || operand.sizes[d] == 1, "vectors");
    if (operand.sizes[d] != 1) n = operand.sizes[d], stride = operand.strides[d];
  }
  check(operand.dtype == kDtypeFloat, "float32 vectors");
  check((n == 1 || n == channels || channels < 0) && n <= length, "a number per channel");
  float* copy = arena.take(length);
  std::fill(copy, copy + length, n == 1 ? *floats(operand) : 0.0f);
  for (int64_t c = 0; n > 1 && c < n; c++) copy[c] = floats(operand)[c * stride];
  return copy;
}

template <class T> static List<T> list(const std::vector<T>& items) { return {items.data(), int64_t(items.size())}; }

// A job and everything it points to.
struct Prepared {
  Job job{};
  Arena arena;
  std::vector<Source> rows, positions;
  std::vector<Mask> masks;
  std::vector<Product> row_weights;
  std::vector<std::vector<Product>> products;
  std::vector<Keys> keys;
  std::vector<Packed> weights;
  std::vector<const float*> biases, scales, shifts, parameters, constants;
  std::vector<int64_t> channels;  // of each norm
  std::vector<Instruction> instructions;
  std::vector<TailStep> tail;
};

// Its channels side by side, by a copy where they are not.
static Source source(
    const float* data, int64_t B, int64_t T, int64_t D, int64_t row, int64_t position, int64_t channel, Arena& arena) {
  if (channel == 1 || D <= 1) return {data, row, position, D};
  float* copy = arena.take(B * T * D);
  for (int64_t b = 0; b < B; b++)
    for (int64_t t = 0; t < T; t++)
      for (int64_t d = 0; d < D; d++) copy[(b * T + t) * D + d] = data[b * row + t * position + d * channel];
  return {copy, T * D, T > 1 ? D : 0, D};
}

struct Inputs { List<Array> rows, positions, masks, params; };

static void read_sources(Prepared& p, const Inputs& inputs) {
  check(inputs.positions.size && inputs.positions[0].dim == 3, "a source of positions");
  const int64_t B = p.job.B = inputs.positions[0].sizes[0], T = p.job.T = inputs.positions[0].sizes[1];
  for (const Array& x : inputs.rows) {
    check(x.dim == 2 && x.dtype == kDtypeFloat && x.sizes[0] == B, "rows float32 [B, D]");
    p.rows.push_back(source(floats(x), B, 1, x.sizes[1], x.strides[0], 0, x.strides[1], p.arena));
  }
  for (const Array& x : inputs.positions) {
    check(x.dim == 3 && x.dtype == kDtypeFloat && x.sizes[0] == B && x.sizes[1] == T, "positions float32 [B, T, D]");
    p.positions.push_back(source(floats(x), B, T, x.sizes[2], x.strides[0], x.strides[1], x.strides[2], p.arena));
  }
  for (const Array& x : inputs.masks) {
    check(x.dim == 2 && (x.dtype == kDtypeBool || x.dtype == kDtypeFloat), "masks bool or float32 [B, T]");
    check(x.sizes[0] == B && x.sizes[1] == T, "masks [B, T]");
    p.masks.push_back({x.data, x.strides[0], x.strides[1], x.dtype == kDtypeBool});
  }
}

struct Term { int64_t row, position, start, width; float scale; };

static float* packed_zeros(Prepared& p, int64_t K) {
  float* data = p.arena.take(K * padded(p.job.width));
  std::memset(data, 0, K * padded(p.job.width) * 4);
  return data;
}

// All terms of one row source and one position source (-1: none) in one matrix.
static Packed folded(Prepared& p, const std::vector<Term>& terms, const Matrix& weight, int64_t row, int64_t position, int64_t K) {
  float* data = packed_zeros(p, K);
  for (const Term& term : terms)
    if (term.row == row && term.position == position) pack(weight, term.start, K, term.scale, data);
  return {data, K, weight.rows};
}

static void fold(Prepared& p, const std::vector<Term>& terms, const Matrix& weight) {
  const auto has = [&](int64_t row, int64_t position) {
    return std::any_of(terms.begin(), terms.end(), [&](const Term& t) { return t.row == row && t.position == position; });
  };
  for (const Term& term : terms) {
    check(term.row < int64_t(p.rows.size()) && term.position < int64_t(p.positions.size()), "terms of known sources");
    check(term.row >= 0 || term.position >= 0, "terms with a source");
    check(term.row < 0 || p.rows[term.row].width == term.width, "rows as wide as their terms");
    check(term.position < 0 || p.positions[term.position].width == term.width, "positions as wide as their terms");
  }
  for (int64_t r = 0; r < int64_t(p.rows.size()); r++)
    if (has(r, -1)) p.row_weights.push_back({r, folded(p, terms, weight, r, -1, p.rows[r].width)});
  p.products.resize(p.positions.size());
  for (int64_t k = 0; k < int64_t(p.positions.size()); k++) {
    const int64_t K = p.positions[k].width;
    for (int64_t r = 0; r < int64_t(p.rows.size()); r++)
      if (has(r, k)) p.products[k].push_back({r, folded(p, terms, weight, r, k, K)});
    if (has(-1, k) || !p.products[k].empty())
      p.keys.push_back({k, folded(p, terms, weight, -1, k, K), list(p.products[k])});
  }
  check(!p.keys.empty(), "a term with positions");
}

static Inputs inputs_of(const Request& request) {
  check(request.n_arguments == 4, "rows, positions, masks and parameters");
  const auto list = [&](int64_t k) { return List<Array>{request.argument(k), request.counts[k]}; };
  return {list(0), list(1), list(2), list(3)};
}

static Prepared prepare(const Inputs& inputs, Words& words) {
  Prepared p;
  const auto param = [&](int64_t index) -> const Array& {
    check(index >= 0 && index < inputs.params.size, "a known parameter");
    return inputs.params[index];
  };
  read_sources(p, inputs);
  const Matrix first = matrix(param(words.next()));
  const int64_t bias = words.next();
  p.job.width = p.job.widest = first.rows;
  std::vector<Term> terms(words.next());
  for (Term& term : terms) {
    term = {words.next(), words.next(), words.next(), words.next(), 0};
    term.scale = float(words.number());
  }
  std::vector<std::pair<int64_t, int64_t>> layers(words.next());
  for (auto& layer : layers) {
    layer.first = words.next();
    layer.second = words.next();
    p.job.widest = std::max(p.job.widest, matrix(param(layer.first)).rows);
  }
  const int64_t length = padded(p.job.widest);
  const auto bias_of = [&](int64_t index, int64_t N) -> const float* {
    if (index >= 0) return vector_of(param(index), N, length, p.arena);
    float* zeros = p.arena.take(length);
    std::memset(zeros, 0, length * 4);
    return zeros;
  };
  p.job.bias = bias_of(bias, first.rows);
  fold(p, terms, first);
  for (const auto& [index, bias] : layers) {
    const Matrix weight = matrix(param(index));
    float* data = p.arena.take(weight.columns * padded(weight.rows));
    std::memset(data, 0, weight.columns * padded(weight.rows) * 4);
    pack(weight, 0, weight.columns, 1, data);
    p.weights.push_back({data, weight.columns, weight.rows});
    p.biases.push_back(bias_of(bias, weight.rows));
  }
  for (int64_t n = words.next(); n > 0; n--) {
    const Array &mean = param(words.next()), &variance = param(words.next());
    const int64_t weight = words.next(), bias = words.next(), channels = mean.dim ? mean.sizes[0] : 1;
    const double eps = words.number();
    float *scale = p.arena.take(length), *shift = p.arena.take(length);
    const float *m = vector_of(mean, channels, length, p.arena), *v = vector_of(variance, channels, length, p.arena);
    const float *w = weight >= 0 ? vector_of(param(weight), channels, length, p.arena) : nullptr;
    const float *b = bias >= 0 ? vector_of(param(bias), channels, length, p.arena) : nullptr;
    for (int64_t c = 0; c < length; c++) {
      scale[c] = float(1 / std::sqrt(double(v[c]) + eps)) * (w ? w[c] : 1.0f);
      shift[c] = (b ? b[c] : 0.0f) - m[c] * scale[c];
    }
    p.channels.push_back(channels);
    p.scales.push_back(scale);
    p.shifts.push_back(shift);
  }
  for (int64_t n = words.next(); n > 0; n--) {
    float* constant = p.arena.take(length);
    std::fill(constant, constant + length, float(words.number()));
    p.constants.push_back(constant);
  }
  p.parameters.resize(inputs.params.size);
  int64_t widths[kMostRegisters] = {first.rows}, width = first.rows;  // of each register, and of the last layer
  const auto check_operand = [&](int64_t index) {
    if (index >= kConstant) return check(index - kConstant < int64_t(p.constants.size()), "a known constant");
    if (index < kParameter) return check(index >= 0 && index < kMostRegisters, "a known register");
    const Array& vector = param(index - kParameter);
    const float*& copy = p.parameters[index - kParameter];
    if (!copy) copy = vector_of(vector, -1, length, p.arena);
    int64_t n = 1;
    for (int32_t d = 0; d < vector.dim; d++) n *= vector.sizes[d];
    check(n == 1 || n == width, "a number per channel");
  };
  for (int64_t n = words.next(); n > 0; n--) {
    const Instruction step{words.next(), words.next(), words.next(), words.next()};
    check(step.op >= kLinear && step.op <= kPRelu && step.dst >= 0 && step.dst < kMostRegisters, "a known step and register");
    check_operand(step.left);
    if (step.op == kLinear) {
      check(step.right >= 0 && step.right < int64_t(layers.size()) && step.left < kParameter, "a known layer");
      check(p.weights[step.right].K == widths[step.left], "layers as wide as what they read");
      width = p.weights[step.right].N;
    } else if (step.op == kBatchNorm) {
      check(step.right >= 0 && step.right < int64_t(p.scales.size()) && p.channels[step.right] == width, "a known norm");
    } else {
      check_operand(step.right);
    }
    widths[step.dst] = width;
    p.instructions.push_back(step);
  }
  p.job.score = words.next();
  check(p.job.score >= 0 && p.job.score < kMostRegisters && widths[p.job.score] > 0, "a register with a score");
  for (int64_t n = words.next(); n > 0; n--) {
    TailStep step{words.next(), words.next(), 0};
    step.value = float(words.number());
    check(step.op >= kScale && step.op <= kSoftmax, "a known step");
    const bool masked = step.op >= kFill && step.op <= kPlusMask;
    check(!masked || (step.mask >= 0 && step.mask < int64_t(p.masks.size())), "a known mask");
    p.tail.push_back(step);
  }
  p.job.values = words.next();
  check(p.job.values < int64_t(p.positions.size()), "values that are positions");
  return p;
}

static void point(Prepared& p) {
  Job& job = p.job;
  job.rows = list(p.rows), job.positions = list(p.positions), job.masks = list(p.masks);
  job.row_weights = list(p.row_weights), job.keys = list(p.keys), job.weights = list(p.weights);
  job.biases = list(p.biases), job.scales = list(p.scales), job.shifts = list(p.shifts);
  job.parameters = list(p.parameters), job.constants = list(p.constants);
  job.instructions = list(p.instructions), job.tail = list(p.tail);
  job.scratch = scratch;
}

static double flops(const Job& job) {
  double per_position = 0;
  for (const Keys& keys : job.keys) per_position += double(keys.shared.K) * job.width;
  for (const Packed& weight : job.weights) per_position += double(weight.K) * weight.N;
  return 2 * per_position * double(job.T + 1) * double(job.B);
}

void target_attention(const Request& request) {
  Words words(request, kVersion, "target_attention");
  Prepared p = prepare(inputs_of(request), words);
  point(p);
  Job& job = p.job;
  job.out = request.floats({job.B, job.values >= 0 ? p.positions[job.values].width : job.T});
  if (job.values < 0 && job.T == 0) return;  // no scores, and no memory for them
  const int64_t threads = threads_for(flops(job), kParallelFlops, job.B);
  const int64_t some = threads > 1 ? std::max<int64_t>(1, job.B / (8 * threads)) : job.B;  // rows differ in their valid positions
  as_they_come(job.B, threads, some, [&](int64_t first, int64_t last) { (*chosen)(job, first, last); });
}

}  // namespace fxopt::target

FXOPT_EXPORT void fxopt_target_attention_run(const fxopt::Request* request) { fxopt::target::target_attention(*request); }
