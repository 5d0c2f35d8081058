// The kernels for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include "../simd/scalar.h"
#include "select.h"
