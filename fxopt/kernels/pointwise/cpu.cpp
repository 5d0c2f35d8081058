// fxopt::pointwise on the CPU: the steps of a plan over blocks of rows that stay in the first-level cache.

#include "job.h"
#include "schedule.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, pointwise)

static void run(const Request& request) {
  thread_local Job job;  // keeps its memory between calls
  job.resolve(request, *chosen);
  if (job.rows > 0) run_all(job);
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_pointwise_run(const fxopt::Request* request) { fxopt::run(*request); }
