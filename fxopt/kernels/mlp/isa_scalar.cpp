// The kernels for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include <cstdint>
#include <cstring>

#include "chain.h"
#include "../simd/scalar.h"
#include "steps.h"
