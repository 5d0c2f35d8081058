// The kernels for CPUs with avx2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <vector>

#include "layout.h"  // before the target changes: nothing shared may be compiled for this CPU alone
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
#define FXOPT_ISA avx2
#define FXOPT_VECTOR_BYTES 32
#include "kernels.h"
#endif
