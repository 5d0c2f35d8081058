// The kernel for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "job.h"
#include "../simd/scalar.h"
#include "tile.h"
