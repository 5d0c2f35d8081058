// Jagged tensors: offsets from lengths, and the ids of one feature of several that lie back to back.
#pragma once
#include <cstring>

#include "layout.h"

namespace fxopt {

// An element of a 1-D tensor of int32 or int64.
FXOPT_ANYWHERE int64_t integer_at(const Array& array, int64_t k) {
  const int64_t at = k * array.strides[0];
  return array.dtype == kInt64 ? reinterpret_cast<const int64_t*>(array.data)[at] : reinterpret_cast<const int32_t*>(array.data)[at];
}

FXOPT_ANYWHERE bool is_integers(const Array& array) { return array.dim == 1 && (array.dtype == kInt64 || array.dtype == kInt32); }

// The ids [begin, end) of a feature, of `n` ids; false where its offsets do not say.
FXOPT_ANYWHERE bool segment_of(const Array& offsets, const Extra& extra, int64_t n, int64_t& begin, int64_t& end) {
  if (!is_integers(offsets)) return false;
  const int64_t bags = offsets.sizes[0] - extra.include_last, rows = bags / extra.segments, last = (extra.segment + 1) * rows;
  if (bags < 0 || bags % extra.segments) return false;
  begin = extra.segment * rows < offsets.sizes[0] ? integer_at(offsets, extra.segment * rows) : n;
  end = last < offsets.sizes[0] ? integer_at(offsets, last) : n;
  return begin >= 0 && begin <= end && end <= n;
}

inline bool sums(const Array& lengths, int64_t* offsets) {
  int64_t total = 0;
  bool good = true;
  for (int64_t k = 0; k < lengths.sizes[0]; k++) {
    const int64_t length = integer_at(lengths, k);
    good = good && length >= 0 && !__builtin_add_overflow(total, length, &total);
    offsets[k + 1] = total;
  }
  return good;
}

// Operands: lengths int32 or int64 [S], and tensors with a row for each id. words: whether their rows are that many, or
// at least that many. The output: int64 [S + 1].
inline void jagged_offsets(const Request& request) {
  if (request.n_operands < 1 || request.n_words != 1) refused("fxopt.jagged_offsets: expected lengths and tensors");
  const Array& lengths = request.operands[0];
  if (!is_integers(lengths)) refused("fxopt.jagged_offsets: expected lengths int32 or int64 [S]");
  auto* offsets = reinterpret_cast<int64_t*>(request.output({lengths.sizes[0] + 1}, kInt64));
  offsets[0] = 0;
  if (!sums(lengths, offsets)) refused("fxopt.jagged_offsets: expected lengths of at least 0");
  const int64_t total = offsets[lengths.sizes[0]];
  for (int64_t k = 1; k < request.n_operands; k++) {
    const Array& ids = request.operands[k];
    if (ids.dim < 1) refused("fxopt.jagged_offsets: expected tensors with a row for each id");
    if (request.words[0] ? ids.sizes[0] != total : ids.sizes[0] < total)
      refused("fxopt.jagged_offsets: lengths of %lld ids in all, found %lld", (long long)total, (long long)ids.sizes[0]);
  }
}

}  // namespace fxopt
