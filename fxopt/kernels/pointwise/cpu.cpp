// fxopt::pointwise on the CPU: the steps of a plan over blocks of rows that stay in the first-level cache.
#include <cstdlib>

#include "../simd/cpu.h"
#include "job.h"
#include "schedule.h"

namespace fxopt {

static const Kernels* pick(const char* limit) {
#if defined(__x86_64__)
  const Isa isa = best_isa(limit);
  if (isa == Isa::kAvx512) return &avx512::kernels;
  if (isa == Isa::kAvx2) return &avx2::kernels;
#endif
  return &scalar::kernels;
}

static const Kernels* kernels = pick(std::getenv("FXOPT_ISA"));

static void run(const Request& request) {
  thread_local Job job;  // keeps its memory between calls
  job.resolve(request, *kernels);
  if (job.rows > 0) run_all(job);
}

}  // namespace fxopt

#define FXOPT_EXPORT extern "C" __attribute__((visibility("default")))
FXOPT_EXPORT void fxopt_pointwise_run(const fxopt::Request* request) { fxopt::run(*request); }
FXOPT_EXPORT void fxopt_pointwise_isa(const char* limit) { fxopt::kernels = fxopt::pick(limit); }  // for tests
