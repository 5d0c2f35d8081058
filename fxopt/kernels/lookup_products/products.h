// Pairs of table rows, multiplied where they lie. Compiled once per instruction set.
#pragma once
#include "../columns/job.h"
#include "../simd/lanes.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int64_t kMostFetched = 256;  // bytes of a row
constexpr int64_t kFewRows = 16;

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));

// Four partial sums of a dot product.
inline Quad partial_sums(const float* a, const float* b, int64_t n) {
  Quad total{};
  int64_t d = 0;
#if FXOPT_VECTOR_BYTES >= 32
  __m256 wide = _mm256_setzero_ps();
  for (; d + 8 <= n; d += 8) wide = _mm256_fmadd_ps(_mm256_loadu_ps(a + d), _mm256_loadu_ps(b + d), wide);
  total = (Quad)_mm256_castps256_ps128(wide) + (Quad)_mm256_extractf128_ps(wide, 1);
#endif
  for (; d + 4 <= n; d += 4) total += load_as<Quad>(a + d) * load_as<Quad>(b + d);
  for (d = n - n % 4; d < n; d++) total[0] += a[d] * b[d];
  return total;
}

// A factor of a pair, at the block's first row.
struct Side {
  const char* data;
  int64_t row_stride;
  const int32_t* ids;

  const float* row(int64_t k) const { return reinterpret_cast<const float*>(data + ids[k] * row_stride); }
};

// Some rows of a pair.
struct Step {
  const Side &left, &right;
  int64_t pair, row;  // in the block
  int n;

  const float* a(int k) const { return left.row(row + k); }
  const float* b(int k) const { return right.row(row + k); }
};

// DIM: the rows' size where it is known ahead, else 0.
template <int DIM>
inline void dots(const Products& all, const Step& step) {
  const int64_t dim = DIM ? DIM : all.dim;
  float* out = all.out + (all.row0 + step.row) * all.pairs + step.pair;
  int k = 0;
  for (; k + 4 <= step.n; k += 4, out += 4 * all.pairs) {
    const Quad p = partial_sums(step.a(k), step.b(k), dim), q = partial_sums(step.a(k + 1), step.b(k + 1), dim);
    const Quad r = partial_sums(step.a(k + 2), step.b(k + 2), dim), s = partial_sums(step.a(k + 3), step.b(k + 3), dim);
    const Quad pq = __builtin_shuffle(p, q, Ints4{0, 4, 1, 5}) + __builtin_shuffle(p, q, Ints4{2, 6, 3, 7});
    const Quad rs = __builtin_shuffle(r, s, Ints4{0, 4, 1, 5}) + __builtin_shuffle(r, s, Ints4{2, 6, 3, 7});
    const Quad sums = __builtin_shuffle(pq, rs, Ints4{0, 1, 4, 5}) + __builtin_shuffle(pq, rs, Ints4{2, 3, 6, 7});
    for (int j = 0; j < 4; j++) out[j * all.pairs] = sums[j];
  }
  for (; k < step.n; k++, out += all.pairs) {
    const Quad p = partial_sums(step.a(k), step.b(k), dim);
    *out = (p[0] + p[2]) + (p[1] + p[3]);  // as above: a row's result is the same in every batch
  }
}

template <int DIM>
inline void multiply(const Products& all, const Step& step) {
  const int64_t dim = DIM ? DIM : all.dim, stride = all.pairs * dim;
  float* out = all.out + (all.row0 + step.row) * stride + step.pair * dim;
  for (int k = 0; k < step.n; k++, out += stride) {
    const float *a = step.a(k), *b = step.b(k);
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      const Quad product = load_as<Quad>(a + d) * load_as<Quad>(b + d);
      memcpy(out + d, &product, sizeof product);
    }
    for (; d < dim; d++) out[d] = a[d] * b[d];
  }
}

template <int DIM>
inline void compute(const Products& all, const Step& step) { all.dots ? dots<DIM>(all, step) : multiply<DIM>(all, step); }

inline void compute(const Products& all, const Step& step) {
  switch (all.dim) {
    case 4: return compute<4>(all, step);
    case 8: return compute<8>(all, step);
    case 16: return compute<16>(all, step);
    case 32: return compute<32>(all, step);
    default: return compute<0>(all, step);
  }
}

static bool find(const Products& all, int64_t group) {
  const int64_t index = all.firsts[group];
  const Column& column = all.call.plan.columns[index];
  Job job;
  Error unused;  // the columns themselves say what is wrong
  const bool special = column.pool != kNone || (column.flags & (kWrapNegative | kAdd | kHasBag | kIsMasked)) != 0;
  if (special || column.index != index || !resolve(all.call, column, job, unused) || job.lanes != 1 || job.divides()) return false;
  Value v;
  uint64_t largest = 0;
  for (int64_t row = 0; row < all.stride; row += kTile) {
    const int n = int(std::min<int64_t>(kTile, all.stride - row));
    if (!job.program.run(all.row0 + row, n, v, unused) || !v.is_int()) return false;
    int32_t* ids = all.ids + group * all.stride + row;
    for (int k = 0; k < n; k++) {
      largest = std::max(largest, uint64_t(v.i[k]));
      ids[k] = int32_t(v.i[k]);
    }
  }
  all.largest[group] = largest;
  return largest <= INT32_MAX;
}

inline bool resolve_side(const Products& all, int64_t index, Side& side) {
  const int32_t number = all.call.plan.columns[index].table;
  const int64_t group = all.groups[index];
  if (number < 0 || number >= all.call.n_tables) return false;
  const Array& table = all.call.tables[number];
  if (table.dim != 2 || table.dtype != kFloat || table.sizes[1] != all.dim || (table.strides[1] != 1 && all.dim != 1)) return false;
  side = {table.data, table.strides[0] * int64_t(sizeof(float)), all.ids + group * all.stride};
  return all.largest[group] < uint64_t(table.sizes[0]);
}

// Of many tables even small ones are cold. 190 pairs of 380 tables of 32 KB, 4096 rows: 5.3 ms without, 3.3 with.
inline void prefetch(const Side& side, int64_t row, int n, int64_t dim) {
  const int64_t bytes = std::min<int64_t>(dim * int64_t(sizeof(float)), kMostFetched);
  for (int k = 0; k < n; k++)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(reinterpret_cast<const char*>(side.row(row + k)) + at);
}

static bool multiply_pairs(const Products& all, int64_t first, int64_t last, int64_t row0, int64_t row1) {
  Side left[kPairs], right[kPairs];
  for (int64_t p = first; p < last; p++)
    if (!resolve_side(all, p, left[p - first]) || !resolve_side(all, all.pairs + p, right[p - first])) return false;
  const int64_t tiles = (row1 - row0 + kTile - 1) / kTile, n = tiles * (last - first);
  const auto step = [&](int64_t at) {
    const int64_t pair = at / tiles, row = row0 + at % tiles * kTile;
    return Step{left[pair], right[pair], first + pair, row, int(std::min<int64_t>(kTile, row1 - row))};
  };
  const int64_t ahead = row1 - row0 <= kFewRows ? kPairs : 1;  // steps whose rows are on their way
  for (int64_t at = 0; at < n + ahead; at++) {
    if (at < n) {
      const Step next = step(at);
      prefetch(next.left, next.row, next.n, all.dim);
      prefetch(next.right, next.row, next.n, all.dim);
    }
    if (at >= ahead) compute(all, step(at - ahead));
  }
  return true;
}

extern const ProductKernels products = {find, multiply_pairs};

}  // namespace fxopt::FXOPT_ISA
