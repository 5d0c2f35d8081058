// Values as torch computes them on CUDA: integers as int64, float16 and bfloat16 as float that rounds after each step.
#pragma once
#include <cuda_runtime.h>

#include "record.h"

namespace fxopt::cuda {

#define FXOPT_DEVICE __device__ __forceinline__

constexpr unsigned kAll = 0xffffffffu;

// The one that an item or a tile is of.
FXOPT_DEVICE const Segment& segment_of(const Launch& launch, int item) {
  int s = 0;
  while (s + 1 < launch.n_segments && item >= launch.segments[s + 1].first_item) s++;
  return launch.segments[s];
}

struct Value {
  union {
    int64_t i;
    double d;
    float f;
  };
};

#ifdef __CUDACC__
FXOPT_DEVICE float half_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
FXOPT_DEVICE uint16_t float_to_half(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
FXOPT_DEVICE uint16_t float_to_bfloat16(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif
FXOPT_DEVICE float bfloat16_to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

template <class T>
FXOPT_DEVICE T load_as(const char* from) { return __ldg(reinterpret_cast<const T*>(from)); }

// One element as a Value of its dtype.
FXOPT_DEVICE Value load_value(const char* from, int dtype) {
  Value v;
  v.i = 0;
  switch (dtype) {
    case kUInt8: case kBool: v.i = load_as<unsigned char>(from); break;
    case kInt8: v.i = load_as<signed char>(from); break;
    case kInt16: v.i = load_as<short>(from); break;
    case kInt32: v.i = load_as<int>(from); break;
    case kInt64: v.i = load_as<long long>(from); break;
    case kFloat: v.f = load_as<float>(from); break;
    case kDouble: v.d = load_as<double>(from); break;
    case kHalf: v.f = half_to_float(load_as<unsigned short>(from)); break;
    default: v.f = bfloat16_to_float(load_as<unsigned short>(from));
  }
  return v;
}

FXOPT_DEVICE float round_to(float x, int dtype) {
  if (dtype == kHalf) return half_to_float(float_to_half(x));
  return dtype == kBFloat16 ? bfloat16_to_float(float_to_bfloat16(x)) : x;
}

// As torch converts on CUDA: uint8 through int64, the others directly.
template <class F>
FXOPT_DEVICE int64_t truncate(F x, int dtype) {
  switch (dtype) {
    case kBool: return x != 0;
    case kUInt8: return uint8_t(int64_t(x));
    case kInt8: return int8_t(x);
    case kInt16: return int16_t(x);
    case kInt32: return int32_t(x);
    default: return int64_t(x);
  }
}

FXOPT_DEVICE Value cast(Value v, int from, int to) {
  if (from == to) return v;
  Value out;
  out.i = 0;
  if (!is_floating(to)) {
    out.i = !is_floating(from) ? wrap(v.i, to) : from == kDouble ? truncate(v.d, to) : truncate(v.f, to);
  } else if (to == kDouble) {
    out.d = is_floating(from) ? double(v.f) : double(v.i);
  } else {
    out.f = round_to(!is_floating(from) ? float(v.i) : from == kDouble ? float(v.d) : v.f, to);
  }
  return out;
}

FXOPT_DEVICE double as_double(Value v, int dtype) { return dtype == kDouble ? v.d : is_floating(dtype) ? double(v.f) : double(v.i); }
FXOPT_DEVICE float as_float(Value v, int dtype) { return dtype == kDouble ? float(v.d) : is_floating(dtype) ? v.f : float(v.i); }

template <class A>
FXOPT_DEVICE A as_number(Value v, int dtype) {
  if constexpr (sizeof(A) == 8) return as_double(v, dtype);
  else return as_float(v, dtype);
}

template <class A>
FXOPT_DEVICE void store_value(char* to, int dtype, A x) {
  switch (dtype) {
    case kFloat: *reinterpret_cast<float*>(to) = float(x); break;
    case kDouble: *reinterpret_cast<double*>(to) = x; break;
    case kHalf: *reinterpret_cast<uint16_t*>(to) = float_to_half(float(x)); break;
    default: *reinterpret_cast<uint16_t*>(to) = float_to_bfloat16(float(x));
  }
}

// What the output holds: it is written in this launch, so past the read-only cache.
template <class A>
FXOPT_DEVICE A reload(const char* from, int dtype) {
  switch (dtype) {
    case kFloat: return A(*reinterpret_cast<const volatile float*>(from));
    case kDouble: return A(*reinterpret_cast<const volatile double*>(from));
    case kHalf: return A(half_to_float(*reinterpret_cast<const volatile uint16_t*>(from)));
    default: return A(bfloat16_to_float(*reinterpret_cast<const volatile uint16_t*>(from)));
  }
}

// x as the output's dtype holds it.
template <class A>
FXOPT_DEVICE A rounded(A x, int dtype) {
  return dtype == kDouble ? x : A(round_to(float(x), dtype));
}

// Of a row in 8 bits, aligned to floats.
FXOPT_DEVICE Quantization quantization_at(const char* from) { return {load_as<float>(from), load_as<float>(from + 4)}; }
FXOPT_DEVICE float dequantized(unsigned code, const Quantization& by) { return fmaf(float(code), by.scale, by.offset); }

// The same of any alignment.
FXOPT_DEVICE Quantization quantization_anywhere(const char* from) {
  if (reinterpret_cast<uint64_t>(from) % 4 == 0) return quantization_at(from);
  unsigned bits[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < 8; k++) bits[k / 4] |= unsigned(load_as<unsigned char>(from + k)) << k % 4 * 8;
  return {__uint_as_float(bits[0]), __uint_as_float(bits[1])};
}

// Element d of a row in 8 bits.
FXOPT_DEVICE float code_value(const Record& record, const char* row, int64_t d) {
  return dequantized(load_as<unsigned char>(row + d), quantization_anywhere(row + record.dim));
}

// The value of a source at (row, lane), whatever its strides and dtype.
__device__ __noinline__ Value load(const Launch& launch, const View& view, int64_t row, int64_t lane) {
  const char* data = reinterpret_cast<const char*>(launch.words[view.word]) + view.offset + lane * view.lane_stride;
  if (view.inner) data += (row / view.inner) * view.row_stride + (row % view.inner) * view.inner_stride;
  else data += row * view.row_stride;
  return load_value(data, view.dtype);
}

}  // namespace fxopt::cuda
