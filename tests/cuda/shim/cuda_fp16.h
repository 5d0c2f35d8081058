// Half precision as values, with the names CUDA gives them.
#pragma once
#include "cuda_runtime.h"

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
inline float __half2float(__half x) { return fxopt::cuda::half_to_float(x.bits); }
inline __half __float2half_rn(float x) { return {fxopt::cuda::float_to_half(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return shim::from_bits<float>(uint64_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {fxopt::cuda::float_to_bfloat16(x)}; }
