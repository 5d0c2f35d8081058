// A column's index program, one value a thread; all threads of a warp run the same steps.
#pragma once
#include "value.cuh"

namespace fxopt::cuda {

// torch's own search, so that unsorted boundaries give the same place too; NaN gives n.
template <class T, bool RIGHT, class Load>
FXOPT_DEVICE int search(int n, T value, Load load) {
  int start = 0, end = n;
#pragma unroll 1
  while (start < end) {
    const int middle = start + ((end - start) >> 1);
    const T boundary = load(middle);
    if (RIGHT ? boundary > value : boundary >= value) end = middle;
    else start = middle + 1;
  }
  return start;
}

template <class T, class Load>
FXOPT_DEVICE int search(bool right, int n, T value, Load load) {
  return right ? search<T, true>(n, value, load) : search<T, false>(n, value, load);
}

__device__ __noinline__ int bucketize(const Step& step, Value v) {
  const char* from = step.tensor;
  const int64_t stride = step.stride;
  const int dtype = step.tensor_dtype;
  if (dtype == kDouble) return search(step.a, step.n, v.d, [&](int k) { return load_as<double>(from + k * stride); });
  if (is_floating(dtype)) return search(step.a, step.n, v.f, [&](int k) { return load_value(from + k * stride, dtype).f; });
  return search(step.a, step.n, v.i, [&](int k) { return load_value(from + k * stride, dtype).i; });
}

// x % a with Python's sign, by the product with magic = floor(2^64 / |a|), which is off by at most one.
FXOPT_DEVICE int64_t remainder(int64_t a, uint64_t magic, int64_t x) {
  const uint64_t size = a < 0 ? 0 - uint64_t(a) : uint64_t(a), n = x < 0 ? 0 - uint64_t(x) : uint64_t(x);
  uint64_t r = n - __umul64hi(n, magic) * size;
  r = r >= size ? r - size : r;
  const int64_t signed_r = int64_t(x < 0 ? 0 - r : r);
  return r != 0 && (x < 0) != (a < 0) ? signed_r + a : signed_r;
}

// The other divisions.
FXOPT_DEVICE int64_t divide(const Step& step, int64_t x) {
  if (step.op == kRemainder) return remainder(step.a, step.magic, x);
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
  return int64_t(negative ? 0 - r : r);
}

FXOPT_DEVICE int64_t with_number(int64_t op, int64_t x, int64_t a) {
  switch (op) {
    case kAddConstant: return int64_t(uint64_t(x) + uint64_t(a));
    case kMul: return int64_t(uint64_t(x) * uint64_t(a));
    case kRSub: return int64_t(uint64_t(a) - uint64_t(x));
    case kClampMin: return x < a ? a : x;
    case kClampMax: return x > a ? a : x;
    case kAnd: return x & a;
    case kOr: return x | a;
    case kXor: return x ^ a;
    case kLShift: return int64_t(uint64_t(x) << (a & 63));
    case kRShift: return x >> (a & 63);
    case kAbs: return x < 0 ? int64_t(0 - uint64_t(x)) : x;
    default: return x;  // floor, ceil, trunc of integers
  }
}

FXOPT_DEVICE int64_t step_int(const Step& step, int64_t x) {
  const bool divides = step.op == kRemainder || step.op == kFmod || step.op == kFloorDivide;
  return wrap(divides ? divide(step, x) : with_number(step.op, x, step.a), step.dtype);
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

// One value on its way through a program.
struct State {
  Value v, saved, second;
  int dtype, saved_dtype;  // the second one's is known to each step that reads it
  bool counts;  // cleared where a KEEP says that the lane does not count
};

// The register that a step names.
FXOPT_DEVICE Value kept_in(const Step& step, const State& state) { return step.b ? state.second : state.saved; }

FXOPT_DEVICE void keep_in(const Step& step, State& state, Value v) {
  if (step.b) {
    state.second = v;
  } else {
    state.saved = v;
    state.saved_dtype = state.dtype;
  }
}

// Any step. `inner` is the lane, or the inner row, that ADD_TENSOR reads.
FXOPT_DEVICE void run_step(const Step& step, State& state, int64_t inner) {
  const int to = step.dtype;
  if (step.op == kSave) {
    keep_in(step, state, state.v);
  } else if (step.op == kSwap) {
    const Value v = state.v;
    state.v = kept_in(step, state);
    keep_in(step, state, v);
  } else if (step.op == kKeep) {
    state.counts = state.counts && holds(step, state.v, state.dtype);
  } else if (step.op == kBucketize) {
    state.v.i = bucketize(step, state.v);
  } else {
    Value x = cast(state.v, state.dtype, to);
    if (step.op == kWhere) x = holds(step, state.saved, state.saved_dtype) ? cast(number(step.b), operand_dtype(to), to) : x;
    else if (step.op == kAddTensor) x = add(x, cast(load_value(step.tensor + inner * step.stride, step.tensor_dtype), step.tensor_dtype, to), to);
    else if (step.op == kCombine) x.i = is_floating(to) ? x.i : wrap(with_number(step.a, x.i, kept_in(step, state).i), to);
    else if (step.op != kCast) x = arithmetic(step, x);
    state.v = x;
  }
  state.dtype = to;
}

struct Outcome {
  Value v;
  bool counts;
};

// A program on a value.
__device__ __noinline__ Outcome run_steps(const Step* steps, int n, Value v, int dtype, int64_t inner) {
  State state{v, v, v, dtype, dtype, true};
  for (int s = 0; s < n; s++) run_step(steps[s], state, inner);
  return {state.v, state.counts};
}

__device__ __noinline__ Outcome evaluate(const Launch& launch, const Values& values, int64_t row, int64_t lane) {
  const Value v = load(launch, values.view, row, lane);
  if (values.n_steps == 0) return {v, true};
  return run_steps(launch.steps + values.steps_at, values.n_steps, v, values.view.dtype, values.view.inner ? row % values.view.inner : lane);
}

}  // namespace fxopt::cuda
