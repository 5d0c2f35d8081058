// A column's index program, one value a thread; all threads of a warp run the same steps.
#pragma once
#include "value.cuh"

namespace fxopt::cuda {

// torch's own search, so that unsorted boundaries give the same place too; NaN gives n.
template <class T, bool RIGHT, class Load>
FXOPT_DEVICE int64_t search(int n, T value, Load load) {
  int start = 0, end = n;
  while (start < end) {
    const int middle = start + ((end - start) >> 1);
    const T boundary = load(middle);
    if (RIGHT ? boundary > value : boundary >= value) end = middle;
    else start = middle + 1;
  }
  return start;
}

template <class T, class Load>
FXOPT_DEVICE int64_t search(bool right, int n, T value, Load load) {
  return right ? search<T, true>(n, value, load) : search<T, false>(n, value, load);
}

// `edges` are the boundaries in shared memory, or null.
FXOPT_DEVICE int64_t bucketize(const Step& step, const char* edges, Value v) {
  const char* from = step.tensor;
  const int64_t stride = step.stride;
  const int dtype = step.tensor_dtype;
  if (edges) return search(step.a, step.n, v.f, [&](int k) { return reinterpret_cast<const float*>(edges)[k]; });
  if (dtype == kDouble) return search(step.a, step.n, v.d, [&](int k) { return load_as<double>(from + k * stride); });
  if (is_floating(dtype)) return search(step.a, step.n, v.f, [&](int k) { return load_value(from + k * stride, dtype).f; });
  return search(step.a, step.n, v.i, [&](int k) { return load_value(from + k * stride, dtype).i; });
}

// Quotient and remainder by a constant: the product with floor(2^64 / |a|) is off by at most one.
FXOPT_DEVICE int64_t divide(const Step& step, int64_t x) {
  const uint64_t a = step.a < 0 ? 0 - uint64_t(step.a) : uint64_t(step.a), n = x < 0 ? 0 - uint64_t(x) : uint64_t(x);
  uint64_t q = __umul64hi(n, step.magic), r = n - q * a;
  if (r >= a) {
    q++;
    r -= a;
  }
  const bool differ = (x < 0) != (step.a < 0), negative = x < 0;
  if (step.op == kFloorDivide) {
    q += differ && r != 0;
    return int64_t(differ ? 0 - q : q);
  }
  const int64_t signed_r = int64_t(negative ? 0 - r : r);
  return step.op == kRemainder && r != 0 && differ ? signed_r + step.a : signed_r;
}

FXOPT_DEVICE int64_t step_int(const Step& step, int64_t x) {
  const int64_t a = step.a;
  switch (step.op) {
    case kAddConstant: x = int64_t(uint64_t(x) + uint64_t(a)); break;
    case kMul: x = int64_t(uint64_t(x) * uint64_t(a)); break;
    case kRSub: x = int64_t(uint64_t(a) - uint64_t(x)); break;
    case kRemainder: case kFmod: case kFloorDivide: x = divide(step, x); break;
    case kClampMin: x = x < a ? a : x; break;
    case kClampMax: x = x > a ? a : x; break;
    case kAnd: x &= a; break;
    case kAbs: x = x < 0 ? int64_t(0 - uint64_t(x)) : x; break;
    default: break;  // floor, ceil, trunc of integers
  }
  return wrap(x, step.dtype);
}

template <class F>
FXOPT_DEVICE F step_float(int op, F x, F a) {
  switch (op) {
    case kAddConstant: return x + a;
    case kMul: return x * a;
    case kRSub: return a - x;
    case kDiv: return x * a;  // the host holds 1 / a: torch divides by a number so on CUDA
    case kClampMin: return x < a ? a : x;
    case kClampMax: return x > a ? a : x;
    case kAbs: return fabs(x);
    case kFloor: return floor(x);
    case kCeil: return ceil(x);
    case kTrunc: return trunc(x);
    case kSqrt: return sqrt(x);
    default: return x;
  }
}

template <class T>
FXOPT_DEVICE bool compare(int how, T x, T a) {
  switch (how) {
    case 0: return x == a;
    case 1: return x != a;
    case 2: return x < a;
    case 3: return x <= a;
    case 4: return x > a;
    default: return x >= a;
  }
}

FXOPT_DEVICE Value number(int64_t bits) {
  Value v;
  v.i = bits;
  return v;
}

// Operands of half precision are floats.
FXOPT_DEVICE int operand_dtype(int dtype) { return is_floating(dtype) && dtype != kDouble ? kFloat : dtype; }

FXOPT_DEVICE bool holds(const Step& step, Value saved, int dtype) {
  const Value a = number(step.a);
  if (!is_floating(dtype)) return compare(step.compare, saved.i, a.i);
  return dtype == kDouble ? compare(step.compare, saved.d, a.d) : compare(step.compare, saved.f, a.f);
}

FXOPT_DEVICE Value arithmetic(const Step& step, Value v) {
  if (!is_floating(step.dtype)) v.i = step_int(step, v.i);
  else if (step.dtype == kDouble) v.d = step_float(step.op, v.d, number(step.a).d);
  else v.f = round_to(step_float(step.op, v.f, number(step.a).f), step.dtype);
  return v;
}

FXOPT_DEVICE Value add(Value v, Value more, int dtype) {
  if (!is_floating(dtype)) v.i = wrap(int64_t(uint64_t(v.i) + uint64_t(more.i)), dtype);
  else if (dtype == kDouble) v.d += more.d;
  else v.f = round_to(v.f + more.f, dtype);
  return v;
}

struct Outcome {
  Value v;
  bool counts;  // false: a KEEP says that the lane does not
};

// Runs a program on one value. `k` is the lane, or the inner row, that ADD_TENSOR reads.
__device__ __noinline__ Outcome run_steps(const Step* steps, int n, Value v, int dtype, int64_t k, const char* edges, int edges_step) {
  Value saved = v;
  int saved_dtype = dtype;
  bool counts = true;
  for (int s = 0; s < n; s++) {
    const Step& step = steps[s];
    switch (step.op) {
      case kSave:
        saved = v;
        saved_dtype = dtype;
        continue;
      case kKeep: counts &= holds(step, v, dtype); continue;
      case kBucketize: v.i = bucketize(step, s == edges_step ? edges : nullptr, v); break;
      default:
        v = cast(v, dtype, step.dtype);
        if (step.op == kWhere) v = holds(step, saved, saved_dtype) ? cast(number(step.b), operand_dtype(step.dtype), step.dtype) : v;
        else if (step.op == kAddTensor) v = add(v, cast(load_value(step.tensor + k * step.stride, step.tensor_dtype), step.tensor_dtype, step.dtype), step.dtype);
        else if (step.op != kCast) v = arithmetic(step, v);
    }
    dtype = step.dtype;
  }
  return {v, counts};
}

FXOPT_DEVICE Outcome evaluate(const Launch& launch, const Values& values, const char* edges, int64_t row, int64_t lane) {
  const Value v = load(launch, values.view, row, lane);
  if (values.n_steps == 0) return {v, true};
  const int64_t k = values.view.inner ? row % values.view.inner : lane;
  return run_steps(launch.steps + values.steps_at, values.n_steps, v, values.view.dtype, k, edges, values.edges);
}

}  // namespace fxopt::cuda
