// fxopt::lookup_products on the CPU: pairs of columns over torch's threads.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <vector>

#include "../columns/checked.h"
#include "../columns/schedule.h"
#include "../scratch.h"
#include "../shims.h"
#include "../threads.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(products, lookup_products)

constexpr int64_t kRows = 2048;   // of a work item: the tables of a pair stay in the cache meanwhile (1024, 4096: the same)
constexpr int64_t kBlock = 8192;  // rows whose ids are made together; for each pair anew they were 2/3 of the time

// work(item) of all items over torch's threads; whether all of them went well.
template <class Work>
static bool each(int64_t items, int64_t threads, const Work& work) {
  std::atomic<bool> fine{true};
  as_they_come(items, std::min(threads, items), 1, [&](int64_t item, int64_t) {
    if (!work(item)) fine = false;
  });
  return fine;
}

static bool run_block(const Products& all, int64_t n_groups) {
  // D = 8: 1.0 to 1.4 ns a pair, at batch 1 15 to 35.
  const double nanoseconds = double(all.pairs) * (30 + double(all.stride) * (0.8 + 0.05 * double(all.dim)));
  const int64_t threads = threads_for(nanoseconds, kParallelNs, INT64_MAX);
  if (!each(n_groups, threads, [&](int64_t group) { return chosen->find(all, group); })) return false;
  const int64_t tiles = (all.pairs + kPairs - 1) / kPairs, parts = (all.stride + kRows - 1) / kRows;
  return each(tiles * parts, threads, [&](int64_t item) {
    const int64_t pair = item % tiles * kPairs, row = item / tiles * kRows;
    return chosen->multiply(all, pair, std::min(pair + kPairs, all.pairs), row, std::min(row + kRows, all.stride));
  });
}

// What the columns themselves say of a call, which know the names behind an id outside its table.
static void explain(const Request& request, const Array& plan) {
  const auto columns = reinterpret_cast<void (*)(const Request*)>(dlsym(RTLD_DEFAULT, "fxopt_columns_run"));
  std::vector<std::vector<char>> rows;
  const auto allocate = [](void* to, int32_t dim, const int64_t* sizes, int32_t) {
    int64_t bytes = sizeof(double);
    for (int32_t d = 0; d < dim; d++) bytes = product(bytes, sizes[d]);
    return static_cast<std::vector<std::vector<char>>*>(to)->emplace_back(size_t(bytes)).data();
  };
  const Request asked{request.operands, request.counts, request.counts[0] + request.counts[1], 2,
                      reinterpret_cast<const int64_t*>(plan.data), plan.sizes[0], allocate, &rows};
  if (columns) columns(&asked);
  refused("fxopt.lookup_products: not plain lookups, or an id outside its table");
}

// Numbers of groups as they come: 0 first, and each new one is the next. `firsts`: the first column of each.
static void read_groups(const int64_t* groups, int64_t n, std::vector<int64_t>& firsts) {
  firsts.clear();
  for (int64_t k = 0; k < n; k++) {
    if (groups[k] < 0 || groups[k] > int64_t(firsts.size())) refused("fxopt.lookup_products: expected a setting of setting_of()");
    if (groups[k] == int64_t(firsts.size())) firsts.push_back(k);
  }
}

// Operands: the columns' tensors and tables, and their plan. Words: whether to sum up, and the group of each column.
static void run(const Request& request) {
  if (request.n_arguments != 3 || request.n_words < 1) refused("fxopt.lookup_products: expected tensors, tables and a plan");
  const Array& words = *request.argument(2);
  const auto* first = reinterpret_cast<const int64_t*>(words.data);
  check_counts(first, words.sizes[0]);
  const Plan plan(first);
  if (plan.header->n_outputs != 1 || plan.header->n_columns != request.n_words - 1 || plan.header->n_columns < 1)
    refused("fxopt.lookup_products: expected a plan of one output, and the group of each column");
  thread_local std::vector<int64_t> firsts;
  read_groups(request.words + 1, request.n_words - 1, firsts);
  Products all{{{plan, request.operands, request.argument(1), request.counts[0], request.counts[1]}, nullptr, nullptr}, firsts.data(), request.words + 1};
  all.pairs = plan.header->n_columns / 2, all.dots = request.words[0], all.row0 = 0;
  OutputData output = measure(all.call, plan.outputs[0]);
  all.rows = output.rows, all.dim = dim_of(all.call, plan.columns[0]);
  all.call.outputs = &output;
  all.out = request.floats({all.rows, all.dots ? all.pairs : all.pairs * all.dim});
  output.data = reinterpret_cast<char*>(all.out);  // where no row is written
  const int64_t block = std::min(all.rows, kBlock), n_groups = int64_t(firsts.size());
  all.largest = reinterpret_cast<uint64_t*>(scratch(size_t(n_groups) * (sizeof(uint64_t) + size_t(block) * sizeof(int32_t))));
  all.ids = reinterpret_cast<int32_t*>(all.largest + n_groups);
  for (; all.row0 < all.rows; all.row0 += block) {
    all.stride = std::min(block, all.rows - all.row0);
    if (!run_block(all, n_groups)) explain(request, words);
  }
}

// Through the dispatcher a plan may come from anywhere.
static Tensor lookup_products(const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan, const std::string setting) {
  check_encoded(operand_of(plan));
  return run_dispatched([](const Request* request) { run(*request); }, words_of(setting), tensors, tables, plan)[0];
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_lookup_products_run(const fxopt::Request* request) { fxopt::run(*request); }

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, m) { m.impl("lookup_products", TORCH_BOX(&fxopt::lookup_products)); }
