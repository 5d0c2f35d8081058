// fxopt::towers on the CPU: checks a program and its tensors, and shares rows or columns among torch's threads.
#include <vector>

#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
#include "../words.h"
#include "program.h"

namespace fxopt::towers {

FXOPT_CHOSEN(kernels, towers)

// Rows of a block: its scratch stays in the second cache, and six rows share a weight that is read.
constexpr int64_t kBlockRows = 240;
constexpr double kParallelNs = 15000;  // work for one more thread: to wake it takes 5 us
constexpr double kLevelNs = 60000;  // work of a level that is worth waking threads for it alone
constexpr int64_t kFewColumns = 32;
constexpr int64_t kMost = int64_t(1) << 31;  // records of a plan, columns of a buffer

static Input input_of(const Array& operand, bool inner) {
  Input input{&operand, 0, 0, 1, inner, true};
  const int32_t leading = operand.dim - 1 - inner;
  if (leading < 0) refused("fxopt.towers: an input with %d dims", operand.dim);
  input.element_stride = operand.strides[operand.dim - 1];
  if (inner) input.inner_stride = operand.strides[operand.dim - 2];
  if (leading > 0) input.row_stride = operand.strides[leading - 1];
  for (int32_t d = leading - 1; d > 0; d--)
    if (operand.sizes[d - 1] > 1 && operand.strides[d - 1] != operand.strides[d] * operand.sizes[d]) input.collapses = false;
  return input;
}

static int64_t rows_of(const Array& operand, bool inner) {
  int64_t rows = 1;
  for (int32_t d = 0; d < operand.dim - 1 - inner; d++) rows *= operand.sizes[d];
  return rows;
}

static bool has_rows_of(const Array& operand, bool inner, const Array& first, bool first_inner) {
  const int32_t leading = first.dim - 1 - first_inner;
  return operand.dim - 1 - inner == leading && std::equal(first.sizes, first.sizes + leading, operand.sizes);
}

static void expect_plan(bool holds, const char* what) {
  if (!holds) refused("fxopt.towers: expected a plan made by words(), found %s", what);
}

static bool within(int64_t start, int64_t width, int64_t n) { return start >= 0 && width >= 0 && width <= n && start <= n - width; }

static void check_source(const Call& call, const Source& source, int64_t width) {
  const int64_t n = source.is_input ? int64_t(call.inputs.size()) : int64_t(call.buffers.size());
  if (!within(source.tensor, 1, n)) refused("fxopt.towers: %s %lld of %lld", source.is_input ? "input" : "buffer", (long long)source.tensor, (long long)n);
  if (!source.is_input) return expect_plan(within(source.start, width, call.buffers[source.tensor].width), "columns that no buffer has");
  const Input& input = call.inputs[source.tensor];
  const Array& x = *input.operand;
  if (!within(source.start, width, x.sizes[x.dim - 1]) || input.inner != (source.place >= 0) || (input.inner && source.place >= x.sizes[x.dim - 2]))
    refused("fxopt.towers: a step reads %lld columns from %lld on, at %lld, of input %lld, which it does not have", (long long)width,
            (long long)source.start, (long long)source.place, (long long)source.tensor);
}

static double check_linear(const Call& call, const LinearStep& linear) {
  expect_plan(within(linear.weight, 1, call.n_weights) && linear.bias >= -1 && linear.bias < call.n_biases, "another weight");
  const Array& weight = call.weight(linear.weight);
  if (weight.dim != 2 || weight.dtype != kDtypeFloat) refused("fxopt.towers: weight %lld must be a float32 matrix", (long long)linear.weight);
  const int64_t N = weight.sizes[0], K = weight.sizes[1];
  if (N != linear.width) refused("fxopt.towers: weight %lld has %lld rows, planned were %lld", (long long)linear.weight, (long long)N, (long long)linear.width);
  if (linear.bias >= 0) {
    const Array& bias = call.bias(linear.bias);
    if (bias.dim != 1 || bias.sizes[0] != N || bias.dtype != kDtypeFloat || (bias.strides[0] != 1 && N > 1))
      refused("fxopt.towers: bias %lld must be dense, with %lld float32 elements", (long long)linear.bias, (long long)N);
  }
  check_source(call, linear.x, K);
  // Nanoseconds of reading the weights once, 40 bytes each, and of 100 multiply-adds each.
  return double(N * K) * std::max(0.1, double(call.rows) * 0.01);
}

// The next step of a plan.
static const Step& step_in(Words& words) {
  constexpr size_t kSizes[] = {sizeof(LinearStep), sizeof(MixtureStep), sizeof(CopyStep), sizeof(ProductStep)};
  const Step& step = words.record<Step>();
  expect_plan(step.op >= kLinear && step.op <= kProduct, "a step");
  words.take(int64_t((kSizes[step.op] - sizeof(Step)) / sizeof(int64_t)));
  if (step.op != kMixture) return step;
  const int64_t count = static_cast<const MixtureStep&>(step).count;
  expect_plan(count > 0 && count <= kMost, "a mixture of no experts");
  words.take(count * int64_t(sizeof(Source) / sizeof(int64_t)));
  return step;
}

// Returns the nanoseconds that the step may take on one thread.
static double check_step(const Call& call, const Step& step) {
  expect_plan(within(step.buffer, 1, int64_t(call.buffers.size())) && within(step.column, step.width, call.buffers[step.buffer].width),
              "a step that writes beside its buffer");
  if (step.op == kLinear) return check_linear(call, static_cast<const LinearStep&>(step));
  if (step.op == kCopy) {
    const auto& copy = static_cast<const CopyStep&>(step);
    check_source(call, copy.x, copy.width);
    return double(call.rows * copy.width) * 0.1;
  }
  if (step.op == kProduct) {
    const auto& product = static_cast<const ProductStep&>(step);
    check_source(call, product.left, product.width);
    check_source(call, product.right, product.width);
    return double(call.rows * product.width) * 0.1;
  }
  const auto& mixture = static_cast<const MixtureStep&>(step);
  check_source(call, mixture.gate, mixture.count);
  for (int64_t i = 0; i < mixture.count; i++) check_source(call, experts_of(mixture)[i], mixture.width);
  return double(call.rows * mixture.count) * double(mixture.width + 16) * 0.1;
}

// Fills the call from the request, allocates its outputs. Returns the nanoseconds that it may take on one thread.
static double prepare(const Request& request, Call& call) {
  Words words(request, kVersion, "towers");
  const int64_t n_inputs = words.next(), *inner = words.take(n_inputs);
  call.n_weights = words.next(), call.n_biases = words.next();
  for (int64_t n : {n_inputs, call.n_weights, call.n_biases}) expect_plan(n >= 0 && n <= kMost, "a number of tensors");
  expect_plan(n_inputs > 0, "no inputs");
  if (request.n_operands != n_inputs + call.n_weights + call.n_biases)
    refused("fxopt.towers: %lld tensors for a plan of %lld inputs, %lld weights and %lld biases", (long long)request.n_operands,
            (long long)n_inputs, (long long)call.n_weights, (long long)call.n_biases);
  call.operands = request.operands;
  const Array& first = request.operands[0];
  const bool first_inner = inner[0];
  if (first.dtype != kDtypeFloat) refused("fxopt.towers: expected float32 inputs");
  call.rows = rows_of(first, first_inner);
  call.inputs.clear();
  for (int64_t i = 0; i < n_inputs; i++) {
    call.inputs.push_back(input_of(request.operands[i], inner[i]));
    if (!has_rows_of(request.operands[i], inner[i], first, first_inner) || request.operands[i].dtype != kDtypeFloat)
      refused("fxopt.towers: input %lld has other rows than the first, or another dtype", (long long)i);
  }
  call.buffers.clear();
  call.scratch_width = 0;
  const int32_t leading = first.dim - 1 - int32_t(first_inner);
  for (int64_t n = words.next(); n > 0; n--) {
    const auto& plan = words.record<BufferPlan>();
    expect_plan(within(0, plan.width, kMost) && within(0, plan.inner, kMost) && (!plan.inner || plan.width % plan.inner == 0), "a buffer");
    Buffer buffer{nullptr, plan.width, call.scratch_width};
    if (plan.is_output) {
      int64_t sizes[16];
      if (leading > 14) refused("fxopt.towers: an input with %d dims", first.dim);
      std::copy(first.sizes, first.sizes + leading, sizes);
      sizes[leading] = plan.inner ? plan.inner : plan.width;
      sizes[leading + 1] = plan.inner ? plan.width / plan.inner : 0;
      buffer.output = request.allocate(request.context, leading + 1 + (plan.inner > 0), sizes, kDtypeFloat);
    } else {
      call.scratch_width += plan.width;
    }
    call.buffers.push_back(buffer);
  }
  call.steps.clear();
  double nanoseconds = 0;
  for (int64_t n = words.next(); n > 0; n--) {
    call.steps.push_back(&step_in(words));
    nanoseconds += check_step(call, *call.steps.back());
  }
  expect_plan(words.are_read(), "more than its steps");
  return nanoseconds;
}

// Columns that may be shared among threads.
static int64_t columns_of(const Step& step) { return step.op == kLinear ? step.width : 1; }

static char* scratch_of(const Call& call, int64_t rows) {
  return scratch(size_t(call.scratch_width * rows) * sizeof(float));
}

static void run_blocks(const Call& call, int64_t threads, int64_t block_rows) {
  as_they_come(call.rows, threads, block_rows, [&](int64_t row0, int64_t row1) {
    const Block block{row0, row1, scratch_of(call, block_rows)};
    for (const Step* step : call.steps) chosen->run(call, *step, block, 0, columns_of(*step));
  });
}

// Steps of one level do not depend on each other: their columns are shared among the threads.
static void run_levels(const Call& call, int64_t threads) {
  const Block block{0, call.rows, scratch_of(call, call.rows)};
  struct Item { const Step* step; int64_t n0, n1; };
  std::vector<Item> items;
  for (size_t s = 0; s < call.steps.size();) {
    items.clear();
    const int64_t level = call.steps[s]->level;
    int64_t columns = 0;
    size_t end = s;
    for (; end < call.steps.size() && call.steps[end]->level == level; end++) columns += columns_of(*call.steps[end]);
    const int64_t share = std::max(kFewColumns, (columns / (2 * threads) + 7) / 8 * 8);
    for (; s < end; s++)
      for (int64_t n = 0, N = columns_of(*call.steps[s]); n < N; n += share) items.push_back({call.steps[s], n, std::min(n + share, N)});
    as_they_come(int64_t(items.size()), items.size() == 1 ? 1 : threads, 1, [&](int64_t i, int64_t) {
      chosen->run(call, *items[size_t(i)].step, block, items[size_t(i)].n0, items[size_t(i)].n1);
    });
  }
}

static void run(const Request& request) {
  thread_local Call memory;  // its vectors keep their memory between calls
  Call& call = memory;
  const double nanoseconds = prepare(request, call);
  if (call.rows == 0) return;
  const int64_t threads = threads_for(nanoseconds, kParallelNs, INT64_MAX);
  if (threads <= 1) return run_blocks(call, 1, std::min(call.rows, kBlockRows));
  const int64_t share = (call.rows + threads - 1) / threads;
  if (share < 4) {
    const bool worth = nanoseconds > kLevelNs * double(call.steps.back()->level + 1);
    return worth ? run_levels(call, threads) : run_blocks(call, 1, call.rows);
  }
  const int64_t blocks = (share + kBlockRows - 1) / kBlockRows, even = (share + blocks - 1) / blocks;
  const int64_t block_rows = even < 12 ? even : (even + 5) / 6 * 6;  // as many for each thread
  run_blocks(call, threads, block_rows);
}

}  // namespace fxopt::towers

// For entry.cpp, which is another library, and for tests: which instruction set runs ("avx512", "avx2", "scalar").
FXOPT_EXPORT void fxopt_towers_run(const fxopt::Request* request) { fxopt::towers::run(*request); }
