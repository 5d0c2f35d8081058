// Which instruction set this CPU has. A library compiles its kernels once for each (simd/__init__.py), in a namespace of
// that name, and picks by this.
#pragma once
#include <cstdlib>
#include <string>

#include "../abi.h"

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

// A pointer to `what` of the best namespace up to `limit`.
#if defined(__x86_64__)
#define FXOPT_BEST(what, limit)                                      \
  (fxopt::best_isa(limit) == fxopt::Isa::kAvx512 ? &avx512::what     \
   : fxopt::best_isa(limit) == fxopt::Isa::kAvx2 ? &avx2::what : &scalar::what)
#else
#define FXOPT_BEST(what, limit) ((void)(limit), &scalar::what)
#endif

// What each instruction set's namespace holds, and the one of them that this process uses, which a test may limit.
#define FXOPT_IN_EACH(declaration)               \
  namespace avx512 { extern declaration; }       \
  namespace avx2 { extern declaration; }         \
  namespace scalar { extern declaration; }
#define FXOPT_CHOSEN(kernels, folder)                                    \
  static const auto* chosen = FXOPT_BEST(kernels, std::getenv("FXOPT_ISA")); \
  FXOPT_EXPORT void fxopt_##folder##_isa(const char* limit) { chosen = FXOPT_BEST(kernels, limit); }
