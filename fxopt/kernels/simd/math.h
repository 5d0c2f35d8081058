// Elementary functions of vectors of floats, within 2 ulp on every instruction set. NaN, infinities, denormals, signed
// zeros and arguments beyond the range give what torch gives. The polynomials are minimax fits (Lawson's iteration) of
// the functions after the usual reductions (Cody and Waite), coefficients from the highest power down.
#pragma once
#include "vector.h"

namespace fxopt::FXOPT_ISA {

template <class... More>
inline Floats polynomial(Floats x, float first, More... more) {
  Floats value = splat(first);
  ((value = fma(value, x, splat(more))), ...);
  return value;
}

// exp(x) = 2^n exp(r), |r| <= log(2) / 2; the power in two steps, so that denormals come out.
inline Floats exp(Floats x) {
  x = x > 89.0f ? splat(89.0f) : x;  // NaN stays; 89 is infinite, -104 is zero
  x = x < -104.0f ? splat(-104.0f) : x;
  const Floats magic = splat(0x1.8p23f);
  const Floats shifted = fma(x, splat(0x1.715476p0f), magic), n = shifted - magic;
  Floats r = fma(n, splat(-0x1.62e4p-1f), x);  // n times the upper part is exact
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  const Floats q = polynomial(r, 0x1.6a1a6ep-10f, 0x1.123fc6p-7f, 0x1.555916p-5f, 0x1.55548ap-3f, 0x1.fffffcp-2f);
  const Floats value = fma(r * r, q, r) + 1.0f;
  const Ints power = bits(shifted) - bits(magic), half = power >> 1;
  const Floats result = value * from_bits((half + 127) << 23) * from_bits((power - half + 127) << 23);
  return x == x ? result : x;
}

// 1 / (1 + exp(-x)), as torch computes it.
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }
inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

inline Floats tanh(Floats x) {
  const Floats s = x * x;
  const Floats q = polynomial(s, -0x1.75e1a8p-8f, 0x1.522692p-6f, -0x1.b83c58p-5f, 0x1.110726p-3f, -0x1.555532p-2f);
  const Floats near = copy_sign(fma(x * s, q, x), x);  // -0 stays
  const Floats magnitude = abs(x);
  const Floats far = copy_sign(1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f), x);
  return magnitude < 0.625f ? near : (x == x ? far : x);
}

// log(x) = e log(2) + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)).
inline Floats log(Floats x) {
  const Ints tiny = x < 0x1p-126f;
  const Floats normal = tiny ? x * 0x1p25f : x;
  const Ints shifted = bits(normal) - 0x3f3504f3;  // sqrt(1/2)
  const Floats e = to_floats((shifted >> 23) - (tiny & 25));
  const Floats f = from_bits((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f, s = f * f;
  const Floats q = polynomial(f, 0x1.14573ep-4f, -0x1.de3bf8p-4f, 0x1.e6f08cp-4f, -0x1.fc220ep-4f, 0x1.233766p-3f,
                              -0x1.555c4ep-3f, 0x1.99a4b6p-3f, -0x1.000006p-2f, 0x1.555548p-2f);
  Floats low = fma(e, splat(-0x1.bd0106p-13f), f * s * q);  // log(2) = 0.693359375 - 2.12e-4
  low = fma(s, splat(-0.5f), low);
  const Floats value = fma(e, splat(0x1.63p-1f), f + low);
  const Floats edge = x == 0.0f ? splat(-__builtin_inff()) : (x < 0.0f ? splat(__builtin_nanf("")) : x);
  return ((x > 0.0f) & (x < __builtin_inff())) ? value : edge;  // edge: 0, negative, infinite, NaN
}

// log(u) for the rounded u = 1 + x, plus what the rounding lost.
inline Floats log1p(Floats x) {
  const Floats u = 1.0f + x, lost = (x - (u - 1.0f)) / u;
  const Floats value = log(u) + lost;
  const Ints plain = (x > -1.0f) & (x < __builtin_inff());
  const Floats small = abs(x) < 0x1p-24f ? x : value;  // keeps -0 and denormals
  return plain ? small : log(u);
}

// As torch's softplus with beta 1 and threshold 20.
inline Floats softplus(Floats x) { return x > 20.0f ? x : log1p(exp(x)); }

// Up to 0.927 a polynomial in x^2; above, 1 - exp(-t (1 + q(t))), as in N. Juffa's erff.
inline Floats erf(Floats x) {
  const Floats s = x * x;
  const Floats q = polynomial(s, 0x1.5cd4aap-14f, -0x1.aa3f2cp-11f, 0x1.54c7f4p-8f, -0x1.b80e9p-6f, 0x1.ce2e0ap-4f,
                              -0x1.812742p-2f, 0x1.06eba8p-3f);
  const Floats near = fma(x, q, x);
  const Floats magnitude = abs(x), t = magnitude < 4.0f ? magnitude : splat(4.0f);  // erf(4) rounds to 1
  const Floats p = polynomial(t, 0x1.78dd84p-17f, -0x1.527c66p-12f, 0x1.dd6cd6p-9f, -0x1.85515ep-6f, 0x1.b32574p-4f,
                              0x1.45328ep-1f, 0x1.0778dcp-3f);
  const Floats far = copy_sign(1.0f - exp(-fma(t, p, t)), x);
  return magnitude < 0.927734375f ? near : (x == x ? far : x);
}

// 0.5 x (1 + erf(x / sqrt(2))), torch's default gelu.
inline Floats gelu(Floats x) { return x * 0.5f * (1.0f + erf(x * 0x1.6a09e6p-1f)); }

}  // namespace fxopt::FXOPT_ISA
