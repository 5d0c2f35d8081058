// Which instruction set this CPU has. A library compiles its kernels once each (isa_avx512.cpp, isa_avx2.cpp,
// isa_scalar.cpp: a target pragma, FXOPT_ISA and FXOPT_VECTOR_BYTES) and picks by this.
#pragma once
#include <string>

namespace fxopt {

enum class Isa { kScalar, kAvx2, kAvx512 };

// The best that the CPU has and `limit` ("scalar", "avx2", "avx512"; null: no limit) allows.
inline Isa best_isa(const char* limit) {
#if defined(__x86_64__)
  const std::string most = limit ? limit : "avx512";
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (most == "avx512" && has_avx512) return Isa::kAvx512;
  if (most != "scalar" && has_avx2) return Isa::kAvx2;
#endif
  return Isa::kScalar;
}

}  // namespace fxopt
