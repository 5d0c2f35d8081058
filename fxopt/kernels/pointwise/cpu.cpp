// fxopt::pointwise on the CPU: the steps of a plan over blocks of rows that stay in the first-level cache.
#include <cstdlib>

#include "../simd/cpu.h"
#include "job.h"
#include "schedule.h"

namespace fxopt {

static const Kernels* kernels = FXOPT_BEST(kernels, std::getenv("FXOPT_ISA"));
FXOPT_EXPORT void fxopt_pointwise_isa(const char* limit) { kernels = FXOPT_BEST(kernels, limit); }  // for tests

static void run(const Request& request) {
  thread_local Job job;  // keeps its memory between calls
  job.resolve(request, *kernels);
  if (job.rows > 0) run_all(job);
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_pointwise_run(const fxopt::Request* request) { fxopt::run(*request); }
