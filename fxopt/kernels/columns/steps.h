// The arithmetic of index programs: one step over a tile of values. Integers wrap at the width of their dtype.
#pragma once
#include "source.h"

namespace fxopt::FXOPT_ISA {

template <class T, class F>
inline void each(T* values, int n, F f) {
  for (int k = 0; k < n; k++) values[k] = f(values[k]);
}

inline double as_double(int64_t bits, bool is_float) { return is_float ? bit_cast<double>(bits) : double(bits); }
inline int64_t as_int(int64_t bits, bool is_float) { return is_float ? int64_t(bit_cast<double>(bits)) : bits; }

// float16 and bfloat16 values live in floats and round after every step.
inline void round_to(int dtype, float* values, int n) {
  if (dtype == kHalf) each(values, n, [](float x) { return widen(to_half(x)); });
  if (dtype == kBFloat16) each(values, n, [](float x) { return widen(to_bfloat16(x)); });
}

inline void wrap_to(int dtype, int64_t* values, int n) {
  switch (dtype) {
    case kUInt8: return each(values, n, [](int64_t x) { return int64_t(uint8_t(x)); });
    case kInt8: return each(values, n, [](int64_t x) { return int64_t(int8_t(x)); });
    case kInt16: return each(values, n, [](int64_t x) { return int64_t(int16_t(x)); });
    case kInt32: return each(values, n, [](int64_t x) { return int64_t(int32_t(x)); });
    case kBool: return each(values, n, [](int64_t x) { return int64_t(x != 0); });
    default: return;
  }
}

template <class F>
inline void truncate_to(int dtype, const F* from, int64_t* to, int n) {
  if (dtype == kInt64) {
    for (int k = 0; k < n; k++) to[k] = int64_t(from[k]);
  } else {
    for (int k = 0; k < n; k++) to[k] = wrap(truncate(from[k], dtype), dtype);
  }
}

// v.to(dtype). In place over the union: widening goes backwards, so that no value is overwritten unread.
inline void cast(int dtype, Value& v, int n) {
  if (dtype == v.dtype) return;
  alignas(64) int64_t buffer[kTile];
  const bool from_float = !v.is_int() && !v.is_double();
  if (!is_floating(dtype)) {
    if (v.is_int()) wrap_to(dtype, v.i, n);
    else if (v.is_double()) truncate_to(dtype, v.d, buffer, n);
    else truncate_to(dtype, v.f, buffer, n);
    if (!v.is_int()) memcpy(v.i, buffer, n * sizeof(int64_t));
  } else if (dtype == kDouble) {
    double* out = reinterpret_cast<double*>(buffer);
    if (v.is_int()) for (int k = 0; k < n; k++) out[k] = double(v.i[k]);
    else for (int k = 0; k < n; k++) out[k] = v.f[k];
    memcpy(v.d, out, n * sizeof(double));
  } else {
    if (!from_float) {
      float* out = reinterpret_cast<float*>(buffer);
      if (v.is_int()) for (int k = 0; k < n; k++) out[k] = float(v.i[k]);
      else for (int k = 0; k < n; k++) out[k] = float(v.d[k]);
      memcpy(v.f, out, n * sizeof(float));
    }
    round_to(dtype, v.f, n);
  }
  v.dtype = dtype;
}

// Floor division by a > 0 where |x| < 2^51: the double quotient is off by at most one, so one correction is exact.
inline bool small(const int64_t* x, int n) {
  uint64_t any = 0;
  for (int k = 0; k < n; k++) any |= uint64_t(x[k] < 0 ? ~x[k] : x[k]);
  return any < (uint64_t(1) << 51);
}

inline int64_t floor_divide(int64_t x, int64_t a) {
  if (a == -1) return int64_t(0 - uint64_t(x));
  const int64_t q = x / a;
  return q - ((x % a != 0) & ((x < 0) != (a < 0)));
}

template <bool QUOTIENT>
inline void divide(int64_t* x, int n, int64_t a) {
  if (a > 0 && a < (int64_t(1) << 51) && small(x, n)) {
    const double reciprocal = 1.0 / double(a);
    for (int k = 0; k < n; k++) {
      int64_t q = int64_t(std::floor(double(x[k]) * reciprocal));
      const int64_t r = x[k] - q * a;
      const int64_t correction = r < 0 ? -1 : (r >= a ? 1 : 0);
      x[k] = QUOTIENT ? q + correction : r - correction * a;
    }
    return;
  }
  for (int k = 0; k < n; k++) {
    const int64_t q = floor_divide(x[k], a);
    x[k] = QUOTIENT ? q : int64_t(uint64_t(x[k]) - uint64_t(q) * uint64_t(a));
  }
}

inline void step_int(const Instr& instr, int64_t* v, int n) {
  const int64_t a = wrap(as_int(instr.a, instr.kinds & 1), instr.dtype);
  switch (instr.op) {
    case kAddConstant: each(v, n, [a](int64_t x) { return int64_t(uint64_t(x) + uint64_t(a)); }); break;
    case kMul: each(v, n, [a](int64_t x) { return int64_t(uint64_t(x) * uint64_t(a)); }); break;
    case kRSub: each(v, n, [a](int64_t x) { return int64_t(uint64_t(a) - uint64_t(x)); }); break;
    case kRemainder: divide<false>(v, n, a); break;
    case kFloorDivide: divide<true>(v, n, a); break;
    case kFmod: each(v, n, [a](int64_t x) { return a == -1 ? 0 : x % a; }); break;
    case kClampMin: each(v, n, [a](int64_t x) { return x < a ? a : x; }); break;
    case kClampMax: each(v, n, [a](int64_t x) { return x > a ? a : x; }); break;
    case kAnd: each(v, n, [a](int64_t x) { return x & a; }); break;
    case kOr: each(v, n, [a](int64_t x) { return x | a; }); break;
    case kXor: each(v, n, [a](int64_t x) { return x ^ a; }); break;
    case kLShift: each(v, n, [a](int64_t x) { return int64_t(uint64_t(x) << (a & 63)); }); break;
    case kRShift: each(v, n, [a](int64_t x) { return x >> (a & 63); }); break;
    case kAbs: each(v, n, [](int64_t x) { return x < 0 ? int64_t(0 - uint64_t(x)) : x; }); break;
    default: return;  // floor, ceil, trunc of integers
  }
  wrap_to(instr.dtype, v, n);
}

template <class F>
inline void each_pair(int64_t* values, const int64_t* others, int n, F f) {
  for (int k = 0; k < n; k++) values[k] = int64_t(f(uint64_t(values[k]), uint64_t(others[k])));
}

// v op saved, both integers.
inline void combine(const Instr& instr, const int64_t* saved, int64_t* v, int n) {
  switch (instr.a) {
    case kAddConstant: each_pair(v, saved, n, [](uint64_t x, uint64_t y) { return x + y; }); break;
    case kMul: each_pair(v, saved, n, [](uint64_t x, uint64_t y) { return x * y; }); break;
    case kRSub: each_pair(v, saved, n, [](uint64_t x, uint64_t y) { return y - x; }); break;
    case kAnd: each_pair(v, saved, n, [](uint64_t x, uint64_t y) { return x & y; }); break;
    case kOr: each_pair(v, saved, n, [](uint64_t x, uint64_t y) { return x | y; }); break;
    case kXor: each_pair(v, saved, n, [](uint64_t x, uint64_t y) { return x ^ y; }); break;
  }
  wrap_to(instr.dtype, v, n);
}

template <class F>
inline void step_float(const Instr& instr, F* v, int n) {
  const F a = F(as_double(instr.a, instr.kinds & 1));
  switch (instr.op) {
    case kAddConstant: return each(v, n, [a](F x) { return x + a; });
    case kMul: return each(v, n, [a](F x) { return x * a; });
    case kRSub: return each(v, n, [a](F x) { return a - x; });
    case kDiv: return each(v, n, [a](F x) { return x / a; });
    case kClampMin: return each(v, n, [a](F x) { return x < a ? a : x; });
    case kClampMax: return each(v, n, [a](F x) { return x > a ? a : x; });
    case kAbs: return each(v, n, [](F x) { return std::fabs(x); });
    case kFloor: return each(v, n, [](F x) { return std::floor(x); });
    case kCeil: return each(v, n, [](F x) { return std::ceil(x); });
    case kTrunc: return each(v, n, [](F x) { return std::trunc(x); });
    case kSqrt: return each(v, n, [](F x) { return std::sqrt(x); });
  }
}

template <class T>
inline void compare(int how, const T* x, T a, int n, uint8_t* out) {
  switch (how) {
    case 0: for (int k = 0; k < n; k++) out[k] = x[k] == a; break;
    case 1: for (int k = 0; k < n; k++) out[k] = x[k] != a; break;
    case 2: for (int k = 0; k < n; k++) out[k] = x[k] < a; break;
    case 3: for (int k = 0; k < n; k++) out[k] = x[k] <= a; break;
    case 4: for (int k = 0; k < n; k++) out[k] = x[k] > a; break;
    default: for (int k = 0; k < n; k++) out[k] = x[k] >= a;
  }
}

template <class T>
inline void put_where(const uint8_t* mask, T b, T* v, int n) {
  for (int k = 0; k < n; k++) v[k] = mask[k] ? b : v[k];
}

inline void compare(const Instr& instr, const Value& v, int n, uint8_t* out) {
  const bool is_float = instr.kinds & 1;
  if (v.is_int()) compare(instr.compare, v.i, as_int(instr.a, is_float), n, out);
  else if (v.is_double()) compare(instr.compare, v.d, as_double(instr.a, is_float), n, out);
  else compare(instr.compare, v.f, float(as_double(instr.a, is_float)), n, out);
}

inline void keep(const Instr& instr, const Value& v, int n, uint8_t* counts) {
  uint8_t holds[kTile];
  compare(instr, v, n, holds);
  for (int k = 0; k < n; k++) counts[k] &= holds[k];
}

inline void where(const Instr& instr, const Value& saved, Value& v, int n) {
  uint8_t mask[kTile];
  const bool b_float = instr.kinds & 2;
  compare(instr, saved, n, mask);
  if (v.is_int()) {
    put_where(mask, wrap(as_int(instr.b, b_float), v.dtype), v.i, n);
  } else if (v.is_double()) {
    put_where(mask, as_double(instr.b, b_float), v.d, n);
  } else {
    put_where(mask, float(as_double(instr.b, b_float)), v.f, n);
    round_to(v.dtype, v.f, n);
  }
}

}  // namespace fxopt::FXOPT_ISA
