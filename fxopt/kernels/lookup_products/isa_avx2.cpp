// The kernels for CPUs with avx2.
#if defined(__x86_64__)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <immintrin.h>

#include "layout.h"
#include "../simd/avx2.h"  // what is shared stands before: it may not be compiled for this CPU alone
#include "products.h"
#endif
