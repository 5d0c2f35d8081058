// What kernels use of the standard library. It stands before the instruction set is chosen: its functions may not be
// compiled for one CPU alone, because the linker keeps one copy of each for the whole library.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
