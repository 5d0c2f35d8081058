// The kernel for CPUs with avx2.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "../target_attention/job.h"  // before the target changes: nothing shared may be compiled for this CPU alone
#include "job.h"
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
#define FXOPT_ISA avx2
#define FXOPT_VECTOR_BYTES 32
#include "heads.h"
#endif
