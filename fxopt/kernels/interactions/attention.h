// Attention over the products of pairs: a row's products are never stored. Lanes are neighbouring pairs.
#pragma once
#include "../simd/softmax.h"
#include "fields.h"

namespace fxopt::FXOPT_ISA {

struct AttentionRow {
  const Attention& job;
  int64_t width, depth;
  float *columns, *rows, *weighted, *scores;  // [D, width], [F, depth], [D, units], [n]

  // What a pair's score takes from vector i: the units' weights times its elements.
  void weigh(int64_t i) {
    for (int64_t d = 0; d < job.x.D; d++) {
      const float x = columns[d * width + i];
      for (int64_t a = 0; a < job.units; a++) weighted[d * job.units + a] = job.weight[d * job.units + a] * x;
    }
  }

  Floats score(int64_t j) const {
    Floats total{};
    for (int64_t a = 0; a < job.units; a += kUnits) {
      Floats units[kUnits][1];
#pragma GCC unroll 8
      for (int r = 0; r < kUnits; r++) units[r][0] = splat(job.bias[a + r]);
      add_products(weighted + a, 1, job.units, columns + j, width, job.x.D, units);
#pragma GCC unroll 8  // a unit that a variable numbers lives in memory
      for (int r = 0; r < kUnits; r++)
        if (a + r < job.A) total = fma(splat(job.query[a + r]), maximum(units[r][0], Floats{}), total);
    }
    return total;
  }

  void score_all() {
    int64_t weighed = -1;
    for (int64_t r = 0; r < job.n_runs; r++) {
      const Run& run = job.runs[r];
      if (run.i != weighed) weigh(weighed = run.i);
      for (int64_t k = 0; k < run.count; k += kLanes) store(scores + run.at + k, score(run.j + k));  // the next run overwrites what is too much
    }
  }

  void pool(float* out) const {
    for (int64_t d = 0; d < job.x.D; d += kLanes) {
      Floats pooled{};
      for (int64_t r = 0; r < job.n_runs; r++) {
        const Run& run = job.runs[r];
        Floats others{};
        for (int64_t k = 0; k < run.count; k++) others = fma(splat(scores[run.at + k]), load(rows + (run.j + k) * depth + d), others);
        pooled = fma(others, load(rows + run.i * depth + d), pooled);
      }
      store_part(out + d, pooled, job.x.D - d);
    }
  }
};

static void attention(const Attention& job, int64_t row0, int64_t row1, float* (*scratch)(int64_t)) {
  const Fields& x = job.x;
  const int64_t width = rounded_up(x.F, kLanes), depth = rounded_up(x.D, kLanes);
  float* memory = scratch(depth * width + kLanes + x.F * depth + x.D * job.units + job.n + 2 * kLanes);
  AttentionRow row{job, width, depth, memory, memory + depth * width + kLanes, nullptr, nullptr};
  row.weighted = row.rows + x.F * depth;
  row.scores = row.weighted + x.D * job.units;
  for (int64_t b = row0; b < row1; b++) {
    load_columns(x, b, width, row.columns);
    load_rows(x, b, depth, row.rows);
    row.score_all();
    pad_for_softmax(row.scores, job.n);
    softmax(row.scores, job.n);
    copy(job.scores + b * job.n, row.scores, job.n);
    row.pool(job.pooled + b * x.D);
  }
}

}  // namespace fxopt::FXOPT_ISA
