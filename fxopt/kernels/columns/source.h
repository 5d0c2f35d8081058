// Reads a Source: a strided view as a sequence of positions, position = row * lanes + lane.
#pragma once
#include "call.h"
#include "types.h"

namespace fxopt::FXOPT_ISA {

constexpr int kTile = 256;  // positions evaluated at once: two 2 KB buffers, in L1

// One value per position of a tile: integers as int64, float16 and bfloat16 as float.
struct Value {
  int dtype;
  union alignas(64) {
    int64_t i[kTile];
    float f[kTile];
    double d[kTile];
  };
  bool is_double() const { return dtype == kDouble; }
  bool is_int() const { return !is_floating(dtype); }
};

struct View {
  const char* data = nullptr;
  int dtype = 0;
  int64_t rows = 0, lanes = 1;  // as the Source says
  int64_t inner = 1;            // the size that ADD_TENSOR's k runs over: lanes, or the second row dim
  int64_t n[3] = {1, 1, 1}, stride[3] = {0, 0, 0};  // outermost first, strides in bytes, merged where possible
};

// `rows` is the number that a Source without row dims repeats over.
inline bool resolve(const Call& call, const Column& column, const Source& source, int64_t rows, View& view, Error& error) {
  if (source.tensor < 0 || source.tensor >= call.n_tensors)
    return error.fail(column.index, 0, "column %d: tensor %d of %lld", column.index, source.tensor, (long long)call.n_tensors);
  const Array& array = call.tensors[source.tensor];
  const int size = element_size(array.dtype);
  auto out_of_range = [&](int64_t dim) { return dim >= array.dim; };
  if (!size || out_of_range(source.row0) || out_of_range(source.row1) || out_of_range(source.lane))
    return error.fail(column.index, 0, "column %d: tensor %d has %d dims and dtype code %d, which its source does not fit",
                      column.index, source.tensor, array.dim, array.dtype);
  view = View{array.data, array.dtype};
  for (int k = 0; k < source.n_fixed; k++) {
    const Fixed& fixed = call.plan.fixed[source.fixed_at + k];
    if (fixed.dim >= array.dim || fixed.index < 0 || fixed.index >= array.sizes[fixed.dim])
      return error.fail(column.index, 0, "column %d: index %lld of dim %lld is outside tensor %d", column.index,
                        (long long)fixed.index, (long long)fixed.dim, source.tensor);
    view.data += fixed.index * array.strides[fixed.dim] * size;
  }
  if (source.row0 < 0) {
    view.n[1] = rows;
  } else {
    view.n[1] = array.sizes[source.row0];
    view.stride[1] = array.strides[source.row0] * size;
  }
  if (source.row1 >= 0) {
    view.n[0] = view.n[1];
    view.stride[0] = view.stride[1];
    view.n[1] = view.inner = array.sizes[source.row1];
    view.stride[1] = array.strides[source.row1] * size;
  }
  view.rows = view.n[0] * view.n[1];
  if (source.lane >= 0) {
    const int64_t available = array.sizes[source.lane] - source.start;
    view.lanes = source.length < 0 ? available : source.length;
    if (source.start < 0 || view.lanes < 0 || view.lanes > available)
      return error.fail(column.index, 0, "column %d: lanes [%lld, %lld) are outside dim %d of tensor %d", column.index,
                        (long long)source.start, (long long)(source.start + view.lanes), source.lane, source.tensor);
    view.n[2] = view.inner = view.lanes;
    view.stride[2] = array.strides[source.lane] * size;
    view.data += source.start * view.stride[2];
  }
  for (int pass = 0; pass < 2; pass++) {  // the longest possible innermost run
    if (view.n[2] == 1 || view.n[2] * view.stride[2] == view.stride[1]) {
      if (view.n[2] == 1) view.stride[2] = view.stride[1];
      view.n[2] *= view.n[1];
      view.n[1] = view.n[0];
      view.stride[1] = view.stride[0];
      view.n[0] = 1;
    }
  }
  return true;
}

template <class To, class From>
inline void load_run(const char* data, int64_t stride, int n, To* out) {
  if (stride == int64_t(sizeof(From))) {
    const From* from = reinterpret_cast<const From*>(data);
    for (int k = 0; k < n; k++) out[k] = To(from[k]);
  } else {
    for (int k = 0; k < n; k++) out[k] = To(*reinterpret_cast<const From*>(data + k * stride));
  }
}

template <class From>
inline void load_half_run(const char* data, int64_t stride, int n, float* out) {
  for (int k = 0; k < n; k++) out[k] = widen(*reinterpret_cast<const From*>(data + k * stride));
}

inline void load_run(int dtype, const char* data, int64_t stride, int n, Value& value, int at) {
  switch (dtype) {
    case kUInt8: case kBool: return load_run<int64_t, uint8_t>(data, stride, n, value.i + at);
    case kInt8: return load_run<int64_t, int8_t>(data, stride, n, value.i + at);
    case kInt16: return load_run<int64_t, int16_t>(data, stride, n, value.i + at);
    case kInt32: return load_run<int64_t, int32_t>(data, stride, n, value.i + at);
    case kInt64: return load_run<int64_t, int64_t>(data, stride, n, value.i + at);
    case kFloat: return load_run<float, float>(data, stride, n, value.f + at);
    case kDouble: return load_run<double, double>(data, stride, n, value.d + at);
    case kHalf: return load_half_run<Half>(data, stride, n, value.f + at);
    default: return load_half_run<BFloat16>(data, stride, n, value.f + at);
  }
}

// The values of positions [position, position + n), n <= kTile.
inline void load(const View& view, int64_t position, int n, Value& value) {
  value.dtype = view.dtype;
  int64_t i = position, j = 0, k = 0;
  if (i >= view.n[2]) {
    j = i / view.n[2];
    i -= j * view.n[2];
    if (j >= view.n[1]) {
      k = j / view.n[1];
      j -= k * view.n[1];
    }
  }
  for (int done = 0; done < n;) {
    const int64_t left = view.n[2] - i;
    const int run = left < n - done ? int(left) : n - done;
    load_run(view.dtype, view.data + k * view.stride[0] + j * view.stride[1] + i * view.stride[2], view.stride[2], run, value, done);
    done += run;
    i = 0;
    if (++j == view.n[1]) {
      j = 0;
      k++;
    }
  }
}

}  // namespace fxopt::FXOPT_ISA
