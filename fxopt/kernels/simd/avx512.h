// From here on code is for CPUs with AVX-512 alone. What other code shares is to be included before.
#pragma once
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")
#define FXOPT_ISA avx512
#define FXOPT_VECTOR_BYTES 64
