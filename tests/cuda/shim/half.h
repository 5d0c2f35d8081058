// Half precision as the GPU converts it: to nearest even.
#pragma once

namespace fxopt::cuda {

inline float half_to_float(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + float(fraction), int(exponent) - 25) : std::ldexp(float(fraction), -24));
}

inline uint16_t float_to_half(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7fff;
  const double magnitude = std::fabs(double(x));
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : -14;
  if (exponent < -14) exponent = -14;
  const long units = std::lrint(std::ldexp(magnitude, 10 - exponent));  // in the last place; the default mode is nearest even
  return uint16_t(sign + (units < 1024 ? units : (exponent + 15) * 1024 + units - 1024));
}

inline uint16_t float_to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t bits = shim::from_bits<uint32_t>(shim::bits(x));
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace fxopt::cuda
