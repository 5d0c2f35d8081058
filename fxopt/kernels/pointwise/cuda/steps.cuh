// What generated kernels are made of (source.py writes the rest). No header is included: NVRTC compiles this text.
namespace fxopt {
namespace generated {

constexpr int kThreads = 256;

// The first statement: as early.cuh says. Behind it all that was on the stream before is done.
__device__ __forceinline__ void in_turn() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#ifdef __CUDACC__
__device__ __forceinline__ float* shared_floats() {
  extern __shared__ float shared[];
  return shared;
}
#else  // the shim
inline float* shared_floats() { return reinterpret_cast<float*>(dynamic_shared()); }
#endif

// A size that indices are divided by: in 32 bits by a product and a shift (Granlund and Montgomery, PLDI'94), because a
// division takes 20 instructions. magic and shift are of :func:`.geometry.divisor`; size is not 0 where this is used.
__device__ __forceinline__ int divided(int n, int size, unsigned magic, unsigned shift) {
  return int((__umulhi(unsigned(n), magic) + unsigned(n)) >> shift);
}
__device__ __forceinline__ long long divided(long long n, long long size, unsigned magic, unsigned shift) { return n / size; }

template <class T>
__device__ __forceinline__ float read(const void* data, Index at) {
  return float(__ldg(static_cast<const T*>(data) + at));
}

__device__ __forceinline__ void write(float* to, float x) { *to = x; }
__device__ __forceinline__ void write(unsigned char* to, float x) { *to = x != 0.0f; }
__device__ __forceinline__ float truth(bool x) { return x ? 1.0f : 0.0f; }

// In the order of plan.py, each as torch computes it on CUDA.
__device__ __forceinline__ float do_copy(float x) { return x; }
__device__ __forceinline__ float do_neg(float x) { return -x; }
__device__ __forceinline__ float do_abs(float x) { return fabsf(x); }
__device__ __forceinline__ float do_exp(float x) { return expf(x); }
__device__ __forceinline__ float do_log(float x) { return logf(x); }
__device__ __forceinline__ float do_log1p(float x) { return log1pf(x); }
__device__ __forceinline__ float do_tanh(float x) { return tanhf(x); }
__device__ __forceinline__ float do_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float do_silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float do_gelu(float x) { return x * 0.5f * (1.0f + erff(x * 0.70710678f)); }
__device__ __forceinline__ float do_erf(float x) { return erff(x); }
__device__ __forceinline__ float do_relu(float x) { return x < 0.0f ? 0.0f : x; }
__device__ __forceinline__ float do_sqrt(float x) { return sqrtf(x); }
__device__ __forceinline__ float do_rsqrt(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ float do_reciprocal(float x) { return 1.0f / x; }
__device__ __forceinline__ float do_square(float x) { return x * x; }
__device__ __forceinline__ float do_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float do_not(float x) { return 1.0f - x; }
__device__ __forceinline__ float do_isnan(float x) { return truth(x != x); }
__device__ __forceinline__ float do_add(float x, float y) { return x + y; }
__device__ __forceinline__ float do_sub(float x, float y) { return x - y; }
__device__ __forceinline__ float do_mul(float x, float y) { return x * y; }
__device__ __forceinline__ float do_div(float x, float y) { return x / y; }
__device__ __forceinline__ float do_maximum(float x, float y) { return x > y || x != x ? x : y; }
__device__ __forceinline__ float do_minimum(float x, float y) { return x < y || x != x ? x : y; }
__device__ __forceinline__ float do_clamp_min(float x, float y) { return do_maximum(x, y); }
__device__ __forceinline__ float do_clamp_max(float x, float y) { return do_minimum(x, y); }
__device__ __forceinline__ float do_lt(float x, float y) { return truth(x < y); }
__device__ __forceinline__ float do_le(float x, float y) { return truth(x <= y); }
__device__ __forceinline__ float do_gt(float x, float y) { return truth(x > y); }
__device__ __forceinline__ float do_ge(float x, float y) { return truth(x >= y); }
__device__ __forceinline__ float do_eq(float x, float y) { return truth(x == y); }
__device__ __forceinline__ float do_ne(float x, float y) { return truth(x != y); }
__device__ __forceinline__ float do_and(float x, float y) { return truth(x != 0.0f && y != 0.0f); }
__device__ __forceinline__ float do_or(float x, float y) { return truth(x != 0.0f || y != 0.0f); }
__device__ __forceinline__ float do_xor(float x, float y) { return truth((x != 0.0f) != (y != 0.0f)); }
__device__ __forceinline__ float do_leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }
__device__ __forceinline__ float do_prelu(float x, float slope) { return x > 0.0f ? x : x * slope; }
__device__ __forceinline__ float do_where(float mask, float x, float y) { return mask != 0.0f ? x : y; }
__device__ __forceinline__ float do_fma(float x, float y, float z) { return fmaf(x, y, z); }

struct Sum {
  __device__ static float start() { return 0.0f; }
  __device__ static float join(float x, float y) { return x + y; }
};
struct Most {
  __device__ static float start() { return -__uint_as_float(0x7f800000u); }
  __device__ static float join(float x, float y) { return do_maximum(x, y); }
};
struct Least {
  __device__ static float start() { return __uint_as_float(0x7f800000u); }
  __device__ static float join(float x, float y) { return do_minimum(x, y); }
};

// Of `lanes` neighbours, a power of two, for all of them. The whole warp is here.
template <class Kind>
__device__ __forceinline__ float across(float x, int lanes) {
  for (int width = lanes / 2; width >= 1; width /= 2) x = Kind::join(x, __shfl_xor_sync(0xffffffffu, x, width));
  return x;
}

// Of LANES lanes that share a row, each holds kSide numbers that lie side by side, and so on until it holds EACH.
template <int LANES, int EACH>
struct Row {
  static constexpr int kSide = EACH < 4 ? EACH : 4;

  __device__ static Index place(int lane, int k) { return (lane + k / kSide * LANES) * kSide + k % kSide; }

  __device__ static bool by_fours(const float* row, Index size) {
    return kSide == 4 && size % 4 == 0 && reinterpret_cast<unsigned long long>(row) % 16 == 0;
  }

  // Zeros behind the end.
  __device__ static void read(const void* data, Index at, Index stride, Index size, int lane, float (&to)[EACH]) {
    const float* row = static_cast<const float*>(data) + at;
    if (stride == 1 && by_fours(row, size)) {
#pragma unroll
      for (int k = 0; k < EACH; k += kSide) {
        const Index own = place(lane, k);
        const float4 x = own < size ? __ldg(reinterpret_cast<const float4*>(row + own)) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        const float four[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < kSide; j++) to[k + j] = four[j];
      }
    } else {
#pragma unroll
      for (int k = 0; k < EACH; k++) to[k] = place(lane, k) < size ? __ldg(row + place(lane, k) * stride) : 0.0f;
    }
  }

  __device__ static void write(float* row, Index size, int lane, const float (&x)[EACH]) {
    if (by_fours(row, size)) {
#pragma unroll
      for (int k = 0; k < EACH; k += kSide) {
        float four[4] = {};
#pragma unroll
        for (int j = 0; j < kSide; j++) four[j] = x[k + j];
        const Index own = place(lane, k);
        if (own < size) *reinterpret_cast<float4*>(row + own) = float4{four[0], four[1], four[2], four[3]};
      }
    } else {
#pragma unroll
      for (int k = 0; k < EACH; k++)
        if (place(lane, k) < size) row[place(lane, k)] = x[k];
    }
  }
};

}  // namespace generated
}  // namespace fxopt
