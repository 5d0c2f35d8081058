// The operator on the CPU: a tensor into lists, then the kernel of select.h over torch's threads.
#include "../entry.h"
#include "../threads.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, k_largest)

// Operands: x [outer, n, inner]. words: k, and whether they stay in their order.
static void run(const Request& request) {
  if (request.n_operands != 1 || request.n_words != 2) refused("fxopt.k_largest: expected a tensor, k and an order");
  const Array& x = request.operands[0];
  const int64_t k = request.words[0];
  if (x.dtype != kDtypeFloat || x.dim != 3) refused("fxopt.k_largest: expected float32 [outer, n, inner]");
  if (k < 1 || k > 64 || k > x.sizes[1]) refused("fxopt.k_largest: expected 1 <= k <= %lld, found %lld", (long long)(x.sizes[1] < 64 ? x.sizes[1] : 64), (long long)k);
  const int64_t outer = x.sizes[0], inner = x.sizes[2];
  float* out = request.floats({outer, k, inner});
  const float* data = reinterpret_cast<const float*>(x.data);
  if (outer == 0 || inner == 0) return;
  const Largest all{data, x.sizes[1], k, 0, x.strides[1], 0, out, inner, 0, request.words[1] != 0};
  const auto rows = [&](int64_t first, int64_t last) {
    Largest job = all;
    if (inner < 8) {  // the lists of one inner index, over the rows
      job.lists = last - first, job.list_step = x.strides[0], job.to_list_step = k * inner;
      for (int64_t i = 0; i < inner; i++) {
        job.from = data + first * x.strides[0] + i * x.strides[2], job.to = out + first * k * inner + i;
        chosen->largest(job);
      }
      return;
    }
    job.lists = inner, job.list_step = x.strides[2], job.to_list_step = 1;
    for (int64_t row = first; row < last; row++) {
      job.from = data + row * x.strides[0], job.to = out + row * k * inner;
      chosen->largest(job);
    }
  };
  in_parts(outer, 1 + 20000 / (k * x.sizes[1] * inner), rows);
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_k_largest_run(const fxopt::Request* request) { fxopt::run(*request); }
