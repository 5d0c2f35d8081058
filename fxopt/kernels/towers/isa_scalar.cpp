// The steps for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "program.h"
#include "../simd/scalar.h"
#include "steps.h"
