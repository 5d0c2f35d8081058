// The kernels for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../simd/scalar.h"
#include "products.h"
