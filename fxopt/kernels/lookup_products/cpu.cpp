// fxopt::lookup_products on the CPU: pairs of columns over torch's threads.
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <vector>

#include "../columns/schedule.h"
#include "../entry.h"
#include "../scratch.h"
#include "../simd/cpu.h"
#include "layout.h"

namespace fxopt {

static const ProductKernels* kernels = FXOPT_BEST(products, std::getenv("FXOPT_ISA"));
FXOPT_EXPORT void fxopt_lookup_products_isa(const char* limit) { kernels = FXOPT_BEST(products, limit); }  // for tests

constexpr int64_t kRows = 2048;  // of a work item: the tables of a pair stay in the cache meanwhile

static bool run_pairs(const Products& all) {
  const int64_t tiles = (all.pairs + kPairs - 1) / kPairs, items = tiles * ((all.rows + kRows - 1) / kRows);
  std::atomic<int64_t> next{0};
  std::atomic<bool> fine{true};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      const int64_t pair = item % tiles * kPairs, row = item / tiles * kRows;
      if (!kernels->run(all, pair, std::min(pair + kPairs, all.pairs), row, std::min(row + kRows, all.rows))) fine = false;
    }
  };
  const double nanoseconds = double(all.pairs) * (2 * kTouchNs + double(all.rows) * (2 + 0.1 * double(all.dim)));
  const int64_t threads = std::min<int64_t>({int64_t(nanoseconds / kParallelNs) + 1, items, torch::stable::get_num_threads()});
  if (threads <= 1) work(0, 1);
  else torch::stable::parallel_for(0, threads, 1, work);
  return fine;
}

static Array as_array(const Operand& tensor) { return {tensor.data, tensor.sizes, tensor.strides, tensor.dim, tensor.dtype}; }

// Operands: the columns' tensors and tables. Words: a Setting, and the columns' plan.
static void run(const Request& request) {
  constexpr int64_t kWords = int64_t(sizeof(Setting) / sizeof(int64_t));
  if (request.n_words < kWords + int64_t(sizeof(Header) / sizeof(int64_t))) refused("fxopt.lookup_products: expected a plan");
  const Setting& setting = *reinterpret_cast<const Setting*>(request.words);
  const Plan plan(request.words + kWords);
  if (plan.header->version != kVersion || plan.header->n_outputs != 1 || plan.header->n_columns % 2)
    refused("fxopt.lookup_products: expected a plan of one output and an even number of columns");
  thread_local std::vector<Array> arrays;
  arrays.clear();
  for (int64_t k = 0; k < request.n_operands; k++) arrays.push_back(as_array(request.operands[k]));
  const int64_t n_tensors = setting.n_tensors, n_tables = request.n_operands - n_tensors;
  Products all{{plan, arrays.data(), arrays.data() + n_tensors, n_tensors, n_tables, nullptr, scratch}, 0, plan.header->n_columns / 2, 0, setting.dots != 0, nullptr};
  OutputData rows = measure(all.call, plan.outputs[0]);
  all.dim = dim_of(all.call, plan.columns[0]);
  all.rows = rows.rows;
  const int64_t sizes[2] = {all.rows, all.dots ? all.pairs : all.pairs * all.dim};
  rows.data = request.allocate(request.context, 2, sizes, kFloat);  // where no row is written
  all.call.outputs = &rows;
  all.out = reinterpret_cast<float*>(rows.data);
  if (!run_pairs(all)) refused("fxopt.lookup_products: not plain lookups, or an id outside its table");
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_lookup_products_run(const fxopt::Request* request) { fxopt::run(*request); }
