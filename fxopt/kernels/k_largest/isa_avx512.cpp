// The kernels for CPUs with avx512.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "layout.h"
#include "../simd/avx512.h"  // what is shared stands before: it may not be compiled for this CPU alone
#include "select.h"
#endif
