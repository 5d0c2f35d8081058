// The kernel for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../target_attention/job.h"  // before the target changes: nothing shared may be compiled for this CPU alone
#include "job.h"
#define FXOPT_ISA scalar
#define FXOPT_VECTOR_BYTES 16
#include "heads.h"
