// The kernel for CPUs with avx512.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#include "../target_attention/job.h"  // before the target changes: nothing shared may be compiled for this CPU alone
#include "job.h"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")
#define FXOPT_ISA avx512
#define FXOPT_VECTOR_BYTES 64
#include "heads.h"
#endif
