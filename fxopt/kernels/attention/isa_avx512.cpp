// The kernel for CPUs with avx512.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "../target_attention/job.h"
#include "job.h"
#include "../simd/avx512.h"  // what is shared stands before: it may not be compiled for this CPU alone
#include "heads.h"
#endif
