// Attention of one head after the other: keys and values packed, a few queries at a time, all in the cache.
#pragma once
#include "../target_attention/multiply.h"
#include "job.h"

namespace fxopt::attention::FXOPT_ISA {

using namespace fxopt::FXOPT_ISA;
using target::padded, target::Packed, target::FXOPT_ISA::kSlack, target::FXOPT_ISA::multiply;

constexpr int64_t kQueries = 48;  // at once

inline const float* at(const Strided& x, const int64_t* index, int64_t n) {
  int64_t offset = 0;
  for (int64_t f = 0; f < n; f++) offset += index[f] * x.factors[f];
  return reinterpret_cast<const float*>(x.data) + offset;
}

inline void place(const Job& job, int64_t head, int64_t* index) {
  for (int64_t f = job.n_factors - 1; f >= 0; f--) index[f] = head % job.factors[f], head /= job.factors[f];
}

struct Memory {
  explicit Memory(const Job& job) : ld(padded(job.keys)), ld_out(padded(job.value_channels)) {
    const int64_t rows = kQueries + kSlack;
    const int64_t floats = job.channels * ld + job.keys * ld_out + rows * (ld + ld_out + padded(job.channels)) + ld + ld_out;
    auto* next = reinterpret_cast<float*>(job.scratch(floats * 4));
    keys = next, next += job.channels * ld;
    values = next, next += job.keys * ld_out;
    scores = next, next += rows * ld;
    result = next, next += rows * ld_out;
    queries = next, next += rows * padded(job.channels);
    zeros = next, next += ld_out;
    padding = next;
    std::memset(keys, 0, job.channels * ld * 4);
    std::memset(values, 0, job.keys * ld_out * 4);
    std::memset(zeros, 0, ld_out * 4);
    for (int64_t s = 0; s < ld; s++) padding[s] = s < job.keys ? 0 : -INFINITY;
  }

  int64_t ld, ld_out;
  float *keys, *values, *scores, *result, *queries, *zeros, *padding;
};

static void pack(const Job& job, Memory& memory, const int64_t* index) {
  const float *k = at(job.key, index, job.n_factors), *v = at(job.value, index, job.n_factors);
  for (int64_t s = 0; s < job.keys; s++, k += job.key.row, v += job.value.row) {
    for (int64_t d = 0; d < job.channels; d++) memory.keys[d * memory.ld + s] = k[d * job.key.column] * job.scale;
    float* packed = memory.values + s * memory.ld_out;
    if (job.value.column == 1) copy(packed, v, job.value_channels);
    else
      for (int64_t d = 0; d < job.value_channels; d++) packed[d] = v[d * job.value.column];
  }
}

static void add(const Job& job, const Strided& x, float* scores, const int64_t* index, int64_t query) {
  const float* row = at(x, index, job.n_factors) + query * x.row;
  for (int64_t s = 0; s < job.keys; s++) scores[s] += row[s * x.column];
}

static void add_mask(const Job& job, float* scores, const int64_t* index, int64_t query) {
  if (job.bias.data) add(job, job.bias, scores, index, query);
  if (job.masking == kNoMask) return;
  if (job.masking == kCausal) {
    for (int64_t s = query + 1; s < job.keys; s++) scores[s] = job.fill;
    return;
  }
  if (job.masking == kAdded) return add(job, job.mask, scores, index, query);
  int64_t offset = query * job.mask.row;
  for (int64_t f = 0; f < job.n_factors; f++) offset += index[f] * job.mask.factors[f];
  const char* mask = job.mask.data + offset;
  for (int64_t s = 0; s < job.keys; s++)
    if ((mask[s * job.mask.column] != 0) == (job.masking == kFillSet)) scores[s] = job.fill;
}

// In place, over whole vectors; nobody reads what is behind the last key.
static void gate(float* x, int64_t n, float divisor) {
  const Floats by = splat(divisor);
  for (int64_t s = 0; s < n; s += kLanes) store(x + s, silu(load(x + s)) / by);
}

static void run_queries(const Job& job, Memory& memory, const int64_t* index, int64_t first, int64_t rows) {
  const float* pointers[kQueries + kSlack];
  const float* q = at(job.query, index, job.n_factors) + first * job.query.row;
  if (job.query.column != 1) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < job.channels; d++) memory.queries[r * job.channels + d] = q[r * job.query.row + d * job.query.column];
    q = memory.queries;
  }
  const int64_t stride = job.query.column == 1 ? job.query.row : job.channels;
  for (int64_t r = 0; r < rows + kSlack; r++) pointers[r] = q + (r < rows ? r : rows - 1) * stride;
  multiply(pointers, rows, Packed{memory.keys, job.channels, job.keys}, memory.scores, memory.ld, memory.padding);
  for (int64_t r = 0; r < rows; r++) {
    float* scores = memory.scores + r * memory.ld;
    add_mask(job, scores, index, first + r);
    if (job.gated) gate(scores, job.keys, job.divisor);
    else softmax(scores, job.keys, job.safe);  // padded
    if (job.weights.data) {
      float* weights = const_cast<float*>(at(job.weights, index, job.n_factors)) + (first + r) * job.weights.row;
      copy(weights, scores, job.keys);
    }
  }
  for (int64_t r = 0; r < rows + kSlack; r++) pointers[r] = memory.scores + (r < rows ? r : rows - 1) * memory.ld;
  multiply(pointers, rows, Packed{memory.values, job.keys, job.value_channels}, memory.result, memory.ld_out, memory.zeros);
  float* out = const_cast<float*>(at(job.out, index, job.n_factors)) + first * job.out.row;
  for (int64_t r = 0; r < rows; r++, out += job.out.row) {
    const float* result = memory.result + r * memory.ld_out;
    if (job.out.column == 1) copy(out, result, job.value_channels);
    else
      for (int64_t d = 0; d < job.value_channels; d++) out[d * job.out.column] = result[d];
  }
}

inline void prefetch(const Strided& x, const int64_t* index, int64_t n, int64_t rows, int64_t channels) {
  if (x.column != 1) return;
  const float* row = at(x, index, n);
  for (int64_t r = 0; r < rows; r++, row += x.row)
    for (int64_t d = 0; d < channels; d += 16) __builtin_prefetch(row + d);
}

// Starts the loads of a head: its rows lie too far apart for the hardware to guess.
static void fetch(const Job& job, int64_t head) {
  int64_t index[kMostFactors];
  place(job, head, index);
  prefetch(job.query, index, job.n_factors, job.queries < kQueries ? job.queries : kQueries, job.channels);
  prefetch(job.key, index, job.n_factors, job.keys < kQueries ? job.keys : kQueries, job.channels);
  prefetch(job.value, index, job.n_factors, job.keys < kQueries ? job.keys : kQueries, job.value_channels);
}

static void run_heads(const Job& job, int64_t first, int64_t last) {
  Memory memory(job);
  for (int64_t head = first; head < last; head++) {
    int64_t index[kMostFactors];
    place(job, head, index);
    pack(job, memory, index);
    if (head + 1 < last) fetch(job, head + 1);
    for (int64_t q = 0; q < job.queries; q += kQueries)
      run_queries(job, memory, index, q, job.queries - q < kQueries ? job.queries - q : kQueries);
  }
}

extern const Run run = run_heads;

}  // namespace fxopt::attention::FXOPT_ISA
