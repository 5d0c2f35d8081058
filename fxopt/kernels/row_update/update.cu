// Rows of tables, each by a group of threads. What limits is memory: a row is read and written where it lies.
#include "../floats.cuh"
#include "layout.h"

namespace fxopt::row_update {

constexpr int kThreads = 256;

// One table's rows, and where its blocks end in the grid.
struct Part {
  Rows<float> rows;
  int32_t group_log2, end_block;  // group: the threads of a row
};

constexpr int kMostParts = 48;  // a launch takes 4 KB of parameters

struct Launch {
  Rates<float> by;
  int32_t kind, n_parts, unused;
  Part parts[kMostParts];
};
static_assert(sizeof(Launch) <= 4096, "the parameters of a launch");

template <int KIND>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Launch launch) {
  in_turn();
  int p = 0;
  while (int(blockIdx.x) >= launch.parts[p].end_block) p++;
  const Rates<float>& by = launch.by;
  const Rows<float>& u = launch.parts[p].rows;
  const int group_log2 = launch.parts[p].group_log2, block = int(blockIdx.x) - (p > 0 ? launch.parts[p - 1].end_block : 0);
  const int64_t thread = int64_t(block) * kThreads + threadIdx.x, k = thread >> group_log2;
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
  const float rate = KIND == kRowwiseAdagrad ? by.rate / (sqrtf(sum) + by.eps) : by.rate;
  if (KIND == kRowwiseAdagrad && lane == 0) u.first[row] = sum;  // all of the group have read it before the sums
  for (int64_t d = lane; d < u.dim; d += size) {
    const int64_t at = row * u.dim + d;
    const float g = __ldg(grad + d);
    if (KIND == kAdam) {
      const float m = by.beta1 * u.first[at] + by.gain1 * g, v = by.beta2 * u.second[at] + by.gain2 * g * g;
      u.first[at] = m;
      u.second[at] = v;
      u.table[at] -= rate * m / (sqrtf(v) / by.root + by.eps);
    } else {
      u.table[at] -= rate * g;
    }
  }
}

}  // namespace fxopt::row_update

// nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_row_update(const fxopt::row_update::Launch* parameters, int, void* stream) {
  using namespace fxopt;
  using namespace fxopt::row_update;
  Launch launch = *parameters;
  int64_t blocks = 0;
  for (int p = 0; p < launch.n_parts; p++) {
    Part& part = launch.parts[p];
    for (part.group_log2 = 0; part.group_log2 < 5 && (1 << part.group_log2) < part.rows.dim;) part.group_log2++;
    if (part.rows.dim > 0) blocks += ((part.rows.n << part.group_log2) + kThreads - 1) / kThreads;
    if (blocks > INT32_MAX) return "fxopt.row_update: more rows than a launch has room for";
    part.end_block = int32_t(blocks);
  }
  if (blocks == 0) return nullptr;
  const auto kernel = launch.kind == kSgd ? update_kernel<kSgd> : launch.kind == kRowwiseAdagrad ? update_kernel<kRowwiseAdagrad> : update_kernel<kAdam>;
  return fxopt::launch(kernel, dim3(unsigned(blocks)), kThreads, stream, launch);
}
