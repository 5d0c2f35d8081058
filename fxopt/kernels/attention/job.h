// One call of fxopt::attention as plain data: what cpu.cpp prepares and heads.h runs, whatever the CPU.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../simd/cpu.h"
#include "../target_attention/job.h"  // whose matrices heads.h multiplies

namespace fxopt::attention {

constexpr int64_t kMostFactors = 4;
enum Masking : int64_t { kNoMask, kFillSet, kFillUnset, kAdded, kCausal };

// Strides in elements: of the batch factors, then of rows (queries, or keys) and columns.
struct Strided { char* data; int64_t factors[kMostFactors], row, column; };

struct Job {
  int64_t n_factors, factors[kMostFactors], queries, keys, channels, value_channels;
  Strided query, key, value, mask, bias, out, weights;  // bias, weights: no data where there is none, or nobody asks
  int64_t masking;
  bool mask_is_bool, safe, gated;  // gated: by silu, not softmax
  float scale, fill, divisor;
  char* (*scratch)(size_t bytes);  // of this thread, aligned to a cache line
};

using Run = void (*)(const Job&, int64_t first, int64_t last);  // heads of all batch factors, counted together

FXOPT_IN_EACH(const Run run)

}  // namespace fxopt::attention
