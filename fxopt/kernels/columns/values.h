// Copies of values that need arithmetic: a program, a conversion, a division or an addition.
#pragma once
#include "job.h"

namespace fxopt::FXOPT_ISA {

template <class O>
bool compute_values(const Job& job, int64_t row0, int64_t row1, Error& error) {
  Value v, divisor;
  for (int64_t position = row0 * job.lanes; position < row1 * job.lanes;) {
    const int64_t row = position / job.lanes, lane = position % job.lanes;
    const int n = job.lanes - lane < kTile ? int(job.lanes - lane) : kTile;
    if (!job.program.run(position, n, v, error)) return false;
    O* out = reinterpret_cast<O*>(job.out + row * job.out_stride) + lane;
    cast(job.out_dtype, v, n);
    if (job.divides()) {
      if (!job.divisor.program.run(row, 1, divisor, error)) return false;
      cast(job.out_dtype, divisor, 1);
      if (v.is_double()) each(v.d, n, [&](double x) { return x / divisor.d[0]; });
      else each(v.f, n, [&](float x) { return x / divisor.f[0]; });
      if (!v.is_double()) round_to(v.dtype, v.f, n);
    }
    for (int k = 0; k < n; k++) {
      const double x = v.is_double() ? v.d[k] : v.f[k];
      if (!job.has(kAdd)) narrow(x, out[k]);
      else if (v.is_double()) narrow(double(widen(out[k])) + x, out[k]);
      else narrow(float(widen(out[k])) + float(x), out[k]);
    }
    position += n;
  }
  return true;
}

inline bool compute_values(const Job& job, int64_t row0, int64_t row1, Error& error) {
  switch (job.out_dtype) {
    case kFloat: return compute_values<float>(job, row0, row1, error);
    case kDouble: return compute_values<double>(job, row0, row1, error);
    case kHalf: return compute_values<Half>(job, row0, row1, error);
    default: return compute_values<BFloat16>(job, row0, row1, error);
  }
}

}  // namespace fxopt::FXOPT_ISA
