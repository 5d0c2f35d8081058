// fxopt::columns on the CPU: torch's stable ABI around the kernels of tile.h.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <string>

#include "../dispatched.h"
#include "../scratch.h"
#include "checked.h"
#include "names.h"
#include "row_gradients.h"
#include "schedule.h"

namespace fxopt {

static_assert(int(torch::headeronly::ScalarType::Float) == kFloat && int(torch::headeronly::ScalarType::Bool) == kBool);
static_assert(int(torch::headeronly::ScalarType::BFloat16) == kBFloat16 && int(torch::headeronly::ScalarType::Long) == kInt64);

FXOPT_CHOSEN(kernels, columns)

static Call call_of(const Request& request) {
  if (request.n_arguments != 2) refused("fxopt.columns: expected tensors and tables");
  const Given given = given_of(request);
  return {given, nullptr, scratch, outgrow_cache(given.tables, given.n_tables)};
}

static void run(const Request& request) {
  check_counts(request.words, request.n_words);
  Call call = call_of(request);
  const int64_t n = call.plan.header->n_outputs;
  thread_local std::vector<OutputData> outputs;
  outputs.resize(n);
  for (int64_t o = 0; o < n; o++) {
    outputs[o] = measure(call, call.plan.outputs[o]);
    outputs[o].data = request.output({outputs[o].rows, outputs[o].width}, call.plan.outputs[o].dtype);
  }
  call.outputs = outputs.data();
  Error error;
  run_all(call, *chosen, error);
  if (error.failed()) throw std::runtime_error(with_names(error.text, request.words, request.n_words, error.column));
}

// With the words of a plan that may come from anywhere.
static Request request_of(const Arguments& arguments, const Tensor& plan, Results& results) {
  const Array words = operand_of(plan);
  check_encoded(words);
  return arguments.request(reinterpret_cast<const int64_t*>(words.data), words.sizes[0], results);
}

std::vector<Tensor> columns(const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  Results results;
  const Arguments arguments(tensors, tables);
  run(request_of(arguments, plan, results));
  return std::move(results.tensors);
}

// A call of a backward; the outputs hold their gradients.
struct Backward {
  Results results;
  Arguments arguments;
  std::vector<OutputData> outputs;
  Request request;
  Call call;

  Backward(const std::vector<Tensor>& grads, const std::vector<Tensor>& tensors, const std::vector<Tensor>& tables, const Tensor& plan)
      : arguments(tensors, tables), request(request_of(arguments, plan, results)), call(call_of(request)) {
    if (int64_t(grads.size()) != call.plan.header->n_outputs) refused("fxopt.columns_backward: expected a gradient per output");
    for (size_t o = 0; o < grads.size(); o++) {
      const Array grad = operand_of(grads[o]);
      if (grad.dim != 2 || grad.dtype != call.plan.outputs[o].dtype || !grads[o].is_contiguous())
        refused("fxopt.columns_backward: gradient %lld must be contiguous, 2-D and of its output's dtype", (long long)o);
      outputs.push_back({grad.data, grad.sizes[0], grad.sizes[1]});
    }
    for (int64_t t = 0; t < call.n_tables; t++)
      if (call.tables[t].dim != 2) refused("fxopt.columns_backward: a table must be 2-D");
    call.outputs = outputs.data();
  }
};

// The gradients of all tables of a plan, dense and contiguous, from those of its outputs.
std::vector<Tensor> columns_backward(
    const std::vector<Tensor> grads, const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  Backward backward(grads, tensors, tables, plan);
  std::vector<char*> data;
  for (int64_t t = 0; t < backward.call.n_tables; t++) {
    const Array& table = backward.call.tables[t];
    if (starts_as_zeros(table)) {
      backward.results.tensors.push_back(zeros_like(table));
      data.push_back(static_cast<char*>(backward.results.tensors.back().data_ptr()));
    } else {
      data.push_back(backward.request.output({table.sizes[0], table.sizes[1]}, table.dtype));
    }
  }
  Error error;
  scatter_all(backward.call, *chosen, data, error);
  if (error.failed()) throw std::runtime_error(error.text);
  return std::move(backward.results.tensors);
}

// The same as the rows that are touched: for each table their numbers int64 [1, U], growing, and gradients [U, D].
std::vector<Tensor> columns_row_gradients(
    const std::vector<Tensor> grads, const std::vector<Tensor> tensors, const std::vector<Tensor> tables, const Tensor plan) {
  Backward backward(grads, tensors, tables, plan);
  Error error;
  row_gradients(backward.call, *chosen, error, [&](const Array& table, int64_t touched) {
    char* rows = backward.request.output({1, touched}, kInt64);
    return std::make_pair(reinterpret_cast<int64_t*>(rows), backward.request.output({touched, table.sizes[1]}, table.dtype));
  });
  if (error.failed()) throw std::runtime_error(error.text);
  return std::move(backward.results.tensors);
}

}  // namespace fxopt

// For entry.cpp, which is another library, and for tests: which instruction set runs ("avx512", "avx2", "scalar").
FXOPT_EXPORT void fxopt_columns_run(const fxopt::Request* request) { fxopt::run(*request); }
FXOPT_EXPORT void fxopt_jagged_offsets_run(const fxopt::Request* request) { fxopt::jagged_offsets(*request); }

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, m) {
  m.impl("columns", TORCH_BOX(&fxopt::columns));
  m.impl("columns_backward", TORCH_BOX(&fxopt::columns_backward));
  m.impl("columns_row_gradients", TORCH_BOX(&fxopt::columns_row_gradients));
}
