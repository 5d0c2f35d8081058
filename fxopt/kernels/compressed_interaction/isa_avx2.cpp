// The kernels for CPUs with avx2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "layout.h"
#include "../simd/avx2.h"  // what is shared stands before: it may not be compiled for this CPU alone
#include "compress.h"
#endif
