// fxopt::attention on the CPU: torch's stable ABI around the kernels of heads.h.
#include <cstring>
#include <vector>

#include "../entry.h"
#include "../scratch.h"
#include "../threads.h"
#include "../words.h"
#include "job.h"

namespace fxopt::attention {

constexpr int64_t kVersion = 0x465841530003;
constexpr double kParallelFlops = 1e6;  // 30 us on one thread; less is not worth waking another

FXOPT_CHOSEN(run, attention)

static void check(bool holds, const char* what) {
  if (!holds) refused("fxopt.attention: expected %s", what);
}

struct View { Strided strided; int64_t sizes[kMostFactors + 2]; };

// An operand of the plan in a tensor; nothing of it lies outside.
static View view(const Array& tensor, int64_t n_factors, Words& words, int64_t element) {
  View result{};
  int64_t last[16] = {}, steps[kMostFactors + 2];
  check(tensor.dim >= 0 && tensor.dim <= 16, "a tensor");
  bool empty = false;
  check(words.next() == n_factors + 2, "operands of the same axes");
  for (int64_t a = 0; a < n_factors + 2; a++) {
    const int64_t dim = words.next(), step = words.next(), size = words.next();
    check(dim >= -1 && dim < tensor.dim && step >= 0 && step <= kMostElements, "axes along the dims of their tensor");
    result.sizes[a] = size >= 0 ? size : dim >= 0 ? tensor.sizes[dim] : 1;
    steps[a] = dim >= 0 ? step * tensor.strides[dim] : 0;
    if (dim >= 0) last[dim] += product(step, std::max<int64_t>(result.sizes[a] - 1, 0));
    empty |= result.sizes[a] == 0;
  }
  int64_t offset = 0;
  for (int64_t n = words.next(); n > 0; n--) {
    const int64_t dim = words.next(), index = words.next();
    check(dim >= 0 && dim < tensor.dim && index >= 0 && index <= tensor.sizes[dim], "starts inside of their tensor");
    offset += index * tensor.strides[dim];
    last[dim] += index;
  }
  for (int32_t dim = 0; dim < tensor.dim; dim++) check(empty || last[dim] < tensor.sizes[dim], "operands inside of their tensor");
  result.strided.data = tensor.data + offset * element;
  std::copy(steps, steps + n_factors, result.strided.factors);
  result.strided.row = steps[n_factors];
  result.strided.column = steps[n_factors + 1];
  return result;
}

static void check_sizes(const View& view, const Job& job, int64_t rows, int64_t columns, bool broadcasts) {
  const auto fits = [&](int64_t size, int64_t expected, int64_t stride) {
    check(size == expected || (broadcasts && stride == 0 && size == 1), "operands of equal sizes");
  };
  for (int64_t f = 0; f < job.n_factors; f++) fits(view.sizes[f], job.factors[f], view.strided.factors[f]);
  fits(view.sizes[job.n_factors], rows, view.strided.row);
  fits(view.sizes[job.n_factors + 1], columns, view.strided.column);
}

static Strided output(const Request& request, const Job& job, int64_t rows, int64_t columns, const int64_t* order) {
  int64_t logical[kMostFactors + 2], sizes[kMostFactors + 2], strides[kMostFactors + 2];
  const int64_t n = job.n_factors;
  std::copy(job.factors, job.factors + n, logical);
  logical[n] = rows, logical[n + 1] = columns;
  for (int64_t a = 0; a < n + 2; a++) sizes[a] = logical[order[a]];
  char* data = request.allocate(request.context, int32_t(n + 2), sizes, kDtypeFloat);
  for (int64_t a = n + 1, stride = 1; a >= 0; a--) strides[order[a]] = stride, stride *= std::max<int64_t>(sizes[a], 1);
  Strided result{data, {}, strides[n], strides[n + 1]};
  std::copy(strides, strides + n, result.factors);
  return result;
}

void attention(const Request& request) {
  Words words(request, kVersion, "attention");
  Job job{};
  check(request.n_operands >= 3 && request.n_words > 1, "queries, keys and values");
  for (int64_t o = 0; o < 3; o++) check(request.operands[o].dtype == kDtypeFloat, "float32 operands");
  const int64_t n = job.n_factors = request.words[1] - 2;  // axes of the first operand
  check(n >= 0 && n <= kMostFactors, "at most 4 batch factors");
  const View query = view(request.operands[0], n, words, 4), key = view(request.operands[1], n, words, 4);
  const View value = view(request.operands[2], n, words, 4);
  const bool has_mask = words.next();
  View masked{}, biased{};
  check(request.n_operands >= 3 + has_mask, "queries, keys, values and the plan's mask");
  if (has_mask) {
    job.mask_is_bool = request.operands[3].dtype == kDtypeBool;
    masked = view(request.operands[3], n, words, job.mask_is_bool ? 1 : 4);
  }
  job.masking = words.next();
  job.fill = float(words.number());
  job.scale = float(words.number());
  int64_t order[kMostFactors + 2], seen = 0, plain[kMostFactors + 2] = {0, 1, 2, 3, 4, 5};
  check(words.next() == n + 2, "an order of all axes");
  for (int64_t a = 0; a < n + 2; a++) {
    order[a] = words.next();
    check(order[a] >= 0 && order[a] < n + 2, "an order of the axes");
    seen |= int64_t(1) << order[a];
  }
  check(seen == (int64_t(1) << (n + 2)) - 1, "an order of all axes");
  const bool weights = words.next();
  job.safe = words.next();
  job.gated = words.next();
  job.divisor = float(words.number());
  const bool has_bias = words.next();
  check(request.n_operands == 3 + has_mask + has_bias, "the plan's mask and bias");
  if (has_bias) biased = view(request.operands[3 + has_mask], n, words, 4);
  check(has_mask == (job.masking >= kFillSet && job.masking <= kAdded), "the mask of its masking");
  for (int64_t f = 0; f < n; f++) {  // a side that is the same for all of a factor has size 1 there
    job.factors[f] = query.sizes[f];
    if (job.factors[f] == 1) job.factors[f] = key.sizes[f];
    if (job.factors[f] == 1) job.factors[f] = value.sizes[f];
  }
  job.queries = query.sizes[n], job.channels = query.sizes[n + 1];
  job.keys = key.sizes[n], job.value_channels = value.sizes[n + 1];
  check_sizes(query, job, job.queries, job.channels, true);
  check_sizes(key, job, job.keys, job.channels, true);
  check_sizes(value, job, job.keys, job.value_channels, true);
  check(key.sizes[n + 1] == job.channels && value.sizes[n] == job.keys, "operands of equal sizes");
  job.query = query.strided, job.key = key.strided, job.value = value.strided;
  if (has_mask) {
    check(job.masking == kAdded ? request.operands[3].dtype == kDtypeFloat : job.mask_is_bool, "a mask of bools, or float32 to add");
    check_sizes(masked, job, job.queries, job.keys, true);
    job.mask = masked.strided;
  }
  if (has_bias) {
    check(request.operands[3 + has_mask].dtype == kDtypeFloat, "a float32 bias");
    check_sizes(biased, job, job.queries, job.keys, true);
    job.bias = biased.strided;
  }
  job.out = output(request, job, job.queries, job.value_channels, order);
  if (weights) job.weights = output(request, job, job.queries, job.keys, plain);
  job.scratch = scratch;
  int64_t heads = 1;
  for (int64_t f = 0; f < n; f++) heads *= job.factors[f];
  if (heads == 0 || job.queries == 0) return;
  if (job.keys == 0) {  // sums of nothing
    std::memset(job.out.data, 0, heads * job.queries * job.value_channels * 4);
    return;
  }
  const double flops = 2.0 * double(heads) * double(job.queries) * double(job.keys) * double(job.channels + job.value_channels + 8);
  const int64_t threads = threads_for(flops, kParallelFlops, heads), some = threads > 1 ? std::max<int64_t>(1, heads / (8 * threads)) : heads;
  as_they_come(heads, threads, some, [&](int64_t first, int64_t last) { (*chosen)(job, first, last); });
}

}  // namespace fxopt::attention

FXOPT_EXPORT void fxopt_attention_run(const fxopt::Request* request) { fxopt::attention::attention(*request); }
