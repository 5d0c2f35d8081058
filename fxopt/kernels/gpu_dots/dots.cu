// A warp a sample: its vectors once from memory, their Gram matrix on tensor cores, the pairs that are asked for in a row.
#include "../floats.cuh"
#include "mma.cuh"

namespace fxopt::gpu_dots {

constexpr int kWarps = 4, kFields = 32, kMostDim = 128, kPad = 8;  // kPad: halves, so that rows start at other banks

struct Dots {
  const uint16_t *vectors, *before;  // [samples, fields, dim], [samples, width]
  const int64_t *i, *j;              // [pairs]
  uint16_t* out;                     // [samples, stride]: before, the pairs, and zeros
  int32_t samples, fields, dim, width, pairs, stride;
};

template <bool BFLOAT>
__device__ __forceinline__ uint16_t rounded(float x) {
#ifdef __CUDACC__
  if constexpr (BFLOAT) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  else return __half_as_ushort(__float2half_rn(x));
#else
  return rounded_on_cpu<BFLOAT>(x);
#endif
}

template <bool BFLOAT>
__global__ void __launch_bounds__(kWarps * 32) dots_kernel(const Dots d) {
  __shared__ __align__(16) uint16_t rows[kWarps][kFields][kMostDim + kPad];
  const int warp = int(threadIdx.x) >> 5, thread = int(threadIdx.x) & 31, sample = int(blockIdx.x) * kWarps + warp;
  if (sample >= d.samples) return;  // the whole warp
  uint16_t(*row)[kMostDim + kPad] = rows[warp];
  const int chunks = d.dim / 8;
  const uint4* from = reinterpret_cast<const uint4*>(d.vectors + int64_t(sample) * d.fields * d.dim);
  for (int k = thread; k < kFields * chunks; k += 32) {
    const int field = k / chunks, at = (k - field * chunks) * 8;
    *reinterpret_cast<uint4*>(&row[field][at]) = field < d.fields ? __ldg(from + k) : uint4{0, 0, 0, 0};
  }
  __syncwarp();
  const int group = thread / 4, pair = thread % 4 * 2;
  float sums[2][4][4] = {};
  for (int k = 0; k < d.dim; k += 16) {
    auto two = [&](int field, int at) { return *reinterpret_cast<const uint32_t*>(&row[field][k + at]); };
    uint32_t a[2][4], b[4][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const int field = m * 16 + group;
      a[m][0] = two(field, pair);
      a[m][1] = two(field + 8, pair);
      a[m][2] = two(field, pair + 8);
      a[m][3] = two(field + 8, pair + 8);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      b[n][0] = two(n * 8 + group, pair);
      b[n][1] = two(n * 8 + group, pair + 8);
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < 4; n++) mma<BFLOAT>(sums[m][n], a[m], b[n]);
  }
  __syncwarp();  // everybody has read the vectors
  float(*gram)[kFields + 1] = reinterpret_cast<float(*)[kFields + 1]>(row);
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int u = 0; u < 4; u++) gram[m * 16 + group + u / 2 * 8][n * 8 + pair + u % 2] = sums[m][n][u];
  __syncwarp();
  uint16_t* out = d.out + int64_t(sample) * d.stride;
  for (int k = d.width + d.pairs + thread; k < d.stride; k += 32) out[k] = 0;
  for (int k = thread; k < d.width; k += 32) out[k] = __ldg(d.before + int64_t(sample) * d.width + k);
  for (int k = thread; k < d.pairs; k += 32) {
    int64_t i = __ldg(d.i + k), j = __ldg(d.j + k);
    i += i < 0 ? d.fields : 0;
    j += j < 0 ? d.fields : 0;
    const bool inside = i >= 0 && i < d.fields && j >= 0 && j < d.fields;
    out[d.width + k] = rounded<BFLOAT>(inside ? gram[i][j] : NAN);
  }
}

}  // namespace fxopt::gpu_dots

// dtype: 1 half, 2 bfloat16. nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* fxopt_dots(const fxopt::gpu_dots::Dots* d, int dtype, void* stream) {
  using namespace fxopt::gpu_dots;
  if (d->fields > kFields || d->dim > kMostDim || d->dim % 16) return "fxopt.gpu_dots: at most 32 vectors of at most 128, a multiple of 16";
  const dim3 blocks(unsigned((d->samples + kWarps - 1) / kWarps));
  return fxopt::launch(dtype == 2 ? dots_kernel<true> : dots_kernel<false>, blocks, kWarps * 32, stream, *d);
}
