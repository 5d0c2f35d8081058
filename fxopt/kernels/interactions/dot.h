// Dot products of pairs of vectors, row by row of the batch: their Gram matrix in the cache, then the pairs asked for.
#pragma once
#include <vector>

#include "fields.h"

namespace fxopt::FXOPT_ISA {

constexpr int kTall = 8;  // rows of a block of products: as many sums as two FMA units have under way
constexpr int64_t kWide = kLanes > kTall ? kLanes : kTall;

// gram[i + r, j + l] over columns [D, width], for kTall rows and a vector of lanes.
inline void gram_block(const float* columns, int64_t D, int64_t width, int64_t i, int64_t j, float* gram) {
  Floats sums[kTall][1] = {};
  add_products(columns + i, 1, width, columns + j, width, D, sums);
#pragma GCC unroll 8  // a sum that a variable numbers may live in memory: 27 vectors of 16 took 1.3 times as long
  for (int r = 0; r < kTall; r++) store(gram + (i + r) * width + j, sums[r][0]);
}

// The blocks of the Gram matrix that some run reads.
struct Blocks {
  struct Block { int64_t i, j; };
  std::vector<Block> blocks;

  Blocks(const Run* runs, int64_t n_runs, int64_t width) {
    const int64_t across = width / kLanes;
    std::vector<char> read(width / kTall * across);
    for (int64_t r = 0; r < n_runs; r++)
      for (int64_t j = runs[r].j / kLanes; j * kLanes < runs[r].j + runs[r].count; j++) read[runs[r].i / kTall * across + j] = 1;
    for (int64_t k = 0; k < int64_t(read.size()); k++)
      if (read[k]) blocks.push_back({k / across * kTall, k % across * kLanes});
  }
};

// Whole vectors as long as what they overwrite is written later.
inline void copy_runs(const Run* runs, int64_t n_runs, int64_t n, const float* gram, int64_t width, float* out) {
  for (int64_t r = 0; r < n_runs; r++) {
    const Run& run = runs[r];
    const float* from = gram + run.i * width + run.j;
    for (int64_t k = 0; k < run.count; k += kLanes) {
      float* to = out + run.at + k;
      if (run.at + k + kLanes <= n) store(to, load(from + k));
      else store(to, load(from + k), int(run.count - k));
    }
  }
}

static void dot(const Dot& job, int64_t row0, int64_t row1, float* (*scratch)(int64_t)) {
  const Fields& x = job.x;
  const int64_t width = rounded_up(x.F, kWide), depth = rounded_up(x.D, kLanes);
  const Blocks needed(job.runs, job.n_runs, width);
  float* columns = scratch(depth * width + width * width + kLanes);
  float* gram = columns + depth * width;
  for (int64_t b = row0; b < row1; b++) {
    load_columns(x, b, width, columns);
    for (const auto& block : needed.blocks) gram_block(columns, x.D, width, block.i, block.j, gram);
    copy_runs(job.runs, job.n_runs, job.n, gram, width, job.out + b * job.width);
  }
}

// weights becomes weights + its transpose, [width, width].
inline void add_transpose(float* weights, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    for (int64_t j = 0; j <= i; j += kLanes) {
      Floats v[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++) v[k] = load(weights + (j + k) * width + i);
      transpose(v);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++) {
        v[k] += load(weights + (i + k) * width + j);
        store(weights + (i + k) * width + j, v[k]);
      }
      if (i == j) continue;
      transpose(v);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; k++) store(weights + (j + k) * width + i, v[k]);
    }
  }
}

// weights[i, j] is the gradient of <x_i, x_j>, 0 where nobody asked for it.
inline void load_weights(const DotBackward& job, const float* grad, int64_t width, float* weights) {
  memset(weights, 0, size_t(width * width + kLanes) * sizeof(float));
  for (int64_t r = 0; r < job.n_runs; r++) {
    const Run& run = job.runs[r];
    float* to = weights + run.i * width + run.j;
    for (int64_t k = 0; k < run.count; k += kLanes) {
      const float* from = grad + run.at + k;
      store(to + k, load(to + k) + load_part(from, run.count - k));
    }
  }
}

// grad_x[f, d..] = sum over g of weights[g, f] x[g, d..], for kTall vectors f and a vector of lanes.
inline void gradient_block(const DotBackward& job, int64_t b, const float* rows, int64_t depth, const float* weights, int64_t width, int64_t f, int64_t d) {
  Floats sums[kTall][1] = {};
  add_products(weights + f, 1, width, rows + d, depth, job.x.F, sums);
#pragma GCC unroll 8  // as in gram_block
  for (int r = 0; r < kTall; r++)
    if (f + r < job.x.F) store_part(job.grad_x.data[f + r] + b * job.grad_x.row[f + r] + d, sums[r][0], job.x.D - d);
}

static void dot_backward(const DotBackward& job, int64_t row0, int64_t row1, float* (*scratch)(int64_t)) {
  const Fields& x = job.x;
  const int64_t width = rounded_up(x.F, kWide), depth = rounded_up(x.D, kLanes);
  float* rows = scratch(x.F * depth + width * width + kLanes);
  float* weights = rows + x.F * depth;
  for (int64_t b = row0; b < row1; b++) {
    load_rows(x, b, depth, rows);
    load_weights(job, job.grad + b * job.width, width, weights);
    add_transpose(weights, width);
    for (int64_t f = 0; f < x.F; f += kTall)
      for (int64_t d = 0; d < depth; d += kLanes) gradient_block(job, b, rows, depth, weights, width, f, d);
  }
}

}  // namespace fxopt::FXOPT_ISA
