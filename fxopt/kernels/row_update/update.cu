// Rows of a table, each by a group of threads. What limits is memory: a row is read and written where it lies.
#include "../floats.cuh"
#include "layout.h"

namespace fxopt::row_update {

constexpr int kThreads = 256;

struct Launch {
  Update<float> update;
  int32_t kind, group_log2;  // threads of a row
};

template <int KIND>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Launch launch) {
  wait_for_stream();
  let_next_start();
  const Update<float>& u = launch.update;
  const int group_log2 = launch.group_log2;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, k = thread >> group_log2;
  const int size = 1 << group_log2, lane = int(thread) & (size - 1);
  const int64_t row = k < u.n ? __ldg(u.rows + k) : -1;
  const bool inside = uint64_t(row) < uint64_t(u.table_rows);  // a bad row is left out
  const float* grad = u.grads + k * u.dim;
  const float before = KIND == kRowwiseAdagrad && inside ? u.first[row] : 0;
  float squares = 0;
  int any = 0;
  for (int64_t d = lane; inside && d < u.dim; d += size) {
    const float g = __ldg(grad + d);
    any |= g != 0;
    squares = fmaf(g, g, squares);
  }
  for (int with = size / 2; with > 0; with /= 2) {
    any |= __shfl_xor_sync(0xffffffffu, any, with);
    if (KIND == kRowwiseAdagrad) squares += __shfl_xor_sync(0xffffffffu, squares, with);
  }
  if (!any) return;
  const float sum = before + squares / float(u.dim);
  const float rate = KIND == kRowwiseAdagrad ? u.rate / (sqrtf(sum) + u.eps) : u.rate;
  if (KIND == kRowwiseAdagrad && lane == 0) u.first[row] = sum;  // all of the group have read it before the sums
  for (int64_t d = lane; d < u.dim; d += size) {
    const int64_t at = row * u.dim + d;
    const float g = __ldg(grad + d);
    if (KIND == kAdam) {
      const float m = u.beta1 * u.first[at] + u.gain1 * g, v = u.beta2 * u.second[at] + u.gain2 * g * g;
      u.first[at] = m;
      u.second[at] = v;
      u.table[at] -= rate * m / (sqrtf(v) / u.root + u.eps);
    } else {
      u.table[at] -= rate * g;
    }
  }
}

}  // namespace fxopt::row_update

// nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_row_update(const fxopt::row_update::Launch* parameters, int, void* stream) {
  using namespace fxopt;
  using namespace fxopt::row_update;
  Launch launch = *parameters;
  const Update<float>& u = launch.update;
  if (u.n == 0 || u.dim == 0) return nullptr;
  for (launch.group_log2 = 0; launch.group_log2 < 5 && (1 << launch.group_log2) < u.dim;) launch.group_log2++;
  const int64_t blocks = ((u.n << launch.group_log2) + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return "fxopt.row_update: more rows than a launch has room for";
  const auto kernel = launch.kind == kSgd ? update_kernel<kSgd> : launch.kind == kRowwiseAdagrad ? update_kernel<kRowwiseAdagrad> : update_kernel<kAdam>;
  return fxopt::launch(kernel, dim3(unsigned(blocks)), kThreads, stream, launch);
}
