// The kernels for any CPU: 16-byte vectors, which every 64-bit CPU has.
#define FXOPT_ISA scalar
#define FXOPT_VECTOR_BYTES 16
#include "kernels.h"
