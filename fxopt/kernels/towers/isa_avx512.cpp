// The steps for CPUs with avx512.
#if defined(__x86_64__)
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>

#include "program.h"
#include "../simd/avx512.h"  // what is shared stands before: it may not be compiled for this CPU alone
#include "steps.h"
#endif
