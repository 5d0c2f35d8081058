// From here on code is for any CPU: 16-byte vectors, which every 64-bit CPU has.
#pragma once
#define FXOPT_ISA scalar
#define FXOPT_VECTOR_BYTES 16
