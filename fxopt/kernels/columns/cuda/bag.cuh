// The ids of one bag, jagged or padded, checked, and what each of them counts.
#pragma once
#include "gather.cuh"

namespace fxopt::cuda {

struct Bag {
  int64_t row, begin;  // begin: of a jagged one, within the ids
  int length;
  int counted;         // lanes below count, where the column has lengths
  bool broken;
};

FXOPT_DEVICE int64_t offset_at(const char* data, const Rare& rare, int64_t bag) {
  const char* from = data + bag * rare.offsets_stride;
  return rare.offsets_dtype == kInt64 ? int64_t(load_as<long long>(from)) : int64_t(load_as<int>(from));
}

// How many lanes l have l < length.
FXOPT_DEVICE int lanes_below(Value length, int dtype, int lanes) {
  if (!is_floating(dtype)) return length.i < 0 ? 0 : length.i < lanes ? int(length.i) : lanes;
  const double x = as_double(length, dtype);
  return x > 0 ? (x < double(lanes) ? int(ceil(x)) : lanes) : 0;  // NaN: none
}

// Bag `row`, within the ids whatever the offsets say. All 32 threads call it; `wanted`: there is such a row.
FXOPT_DEVICE Bag bag_of(const Launch& launch, const Record& record, int64_t row, int64_t rows, bool wanted) {
  if (!wanted) row = 0;
  if (record.flags & kDense) {
    const int lanes = int(record.lanes);
    Bag bag{row, 0, wanted ? lanes : 0, lanes, false};
    if (record.flags & kHasLengths) {
      const Values& lengths = launch.rares[record.extra].lengths;
      bag.counted = lanes_below(evaluate(launch, lengths, row, 0).v, lengths.dtype, lanes);
    }
    return bag;
  }
  const Rare& rare = launch.rares[record.extra];
  const int64_t n = launch.words[rare.bounds_word], n_offsets = launch.words[rare.bounds_word + 1], number = rare.segment * rows + row;
  const char* offsets = reinterpret_cast<const char*>(launch.words[rare.offsets_word]);
  const int64_t begin = offset_at(offsets, rare, number), end = number + 1 < n_offsets ? offset_at(offsets, rare, number + 1) : n;
  const bool broken = begin < 0 || end < begin || end > n || (number == 0 && begin != 0);
  if (__any_sync(kAll, broken) && launch.mode == kRaise) report_first(launch, broken, {kBadOffsets, record.index, row, 0, begin, end, 0});
  return {row, begin, broken || !wanted ? 0 : int(end - begin), INT32_MAX, broken};
}

// The id at (row, lane) where few steps give it: evaluate() is many times the code, for which a launch of few rounds mostly
// waits (H200, 26 ids a bag behind an offset each: 8.2 us).
FXOPT_DEVICE Outcome stepped(const Launch& launch, const Record& record, int64_t row, int64_t lane) {
  const View& view = record.ids.view;
  const char* from = reinterpret_cast<const char*>(launch.words[view.word]) + view.offset + row * view.row_stride + lane * view.lane_stride;
  Outcome found{number(0), true};
  if (view.dtype == kInt64) found.v.i = load_as<long long>(from);
  else if (view.dtype == kInt32) found.v.i = load_as<int>(from);
  else found.v.i = truncate(load_as<float>(from), kInt64);
#pragma unroll 1
  for (int s = 0; s < record.ids.n_steps; s++) {
    const Step& step = launch.steps[record.ids.steps_at + s];
    if (step.op == kAddTensor) found.v.i = int64_t(uint64_t(found.v.i) + uint64_t(load_as<long long>(step.tensor + lane * step.stride)));
    else if (step.op == kKeep) found.counts = found.counts && compare(step.compare, found.v.i, step.a);
  }
  return found;
}

template <class A>
struct Member {
  int id;  // kNoId: nothing, or padding; kBad
  A weight;
  bool counts;
};

// The id at `k` of a bag. All 32 threads call it. `first_look`: it was not evaluated for other dims before.
template <class A>
FXOPT_DEVICE Member<A> member(const Launch& launch, const Record& record, const Bag& bag, int k, bool first_look) {
  const bool wanted = k < bag.length, dense = record.flags & kDense;
  const int64_t row = dense ? bag.row : bag.begin + k, lane = dense ? k : 0;
  Member<A> found{kNoId, A(1), k < bag.counted};
  int64_t id = 0;
  if (wanted) {
    const Outcome outcome = record.flags & kStepped ? stepped(launch, record, row, lane) : evaluate(launch, record.ids, row, lane);
    id = outcome.v.i;
    found.counts &= outcome.counts;
    if (record.flags & kHasWeights) {
      const View& weights = launch.rares[record.extra].weights;
      found.weight = as_number<A>(load(launch, weights, row, lane), weights.dtype);
    }
  }
  found.id = int(checked(launch, record, wanted, id, k, bag.row, first_look && found.counts));
  if (found.id >= 0 && (record.flags & kHasPadding) && found.id == record.padding) found.id = kNoId;
  return found;
}

// What a bag's sum or maximum becomes: a mean's division, NaN where it has nothing to divide or an id was bad, a maximum of
// nothing 0.
template <class A>
FXOPT_DEVICE A finished(const Record& record, A sum, int count, bool poisoned) {
  if (poisoned) return A(NAN);
  if (record.pool != kMean) return count || record.pool != kMax ? sum : A(0);
  return count ? sum / A(count) : (record.flags & kEmptyNan) ? A(NAN) : A(0);
}

}  // namespace fxopt::cuda
