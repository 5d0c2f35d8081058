// The kernel for any CPU: 16-byte vectors, which every 64-bit CPU has.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../target_attention/job.h"
#include "job.h"
#include "../simd/scalar.h"
#include "heads.h"
