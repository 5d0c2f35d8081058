// From here on code is for CPUs with AVX2 alone. What other code shares is to be included before.
#pragma once
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
#define FXOPT_ISA avx2
#define FXOPT_VECTOR_BYTES 32
