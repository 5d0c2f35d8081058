// Step by step: a product of the states with the weights, then the gates.
#include <cstring>

#include "../gemm/gemm.h"
#include "../simd/math.h"
#include "layout.h"

namespace fxopt::FXOPT_ISA {

constexpr int64_t kPanel = 2 * kLanes;

// Whether weights are turned, once for all steps: 7 rows of 300 units take 1.3 times as long so for 3 steps.
static bool turns(const Recurrence& r) { return r.rows >= 6 && r.rows * r.steps >= 128; }

static void turn_all(const Gemm& g, int64_t n, float* panels) {
  for (int64_t at = 0; at < n; at += kPanel, panels += g.K * kPanel) turn<2>(g, at, int(n - at < kPanel ? n - at : kPanel), panels);
}

static void multiply(const Gemm& g, int64_t n, const float* panels) {
  if (!panels) return gemm_by_dots(g, 0, n);
  for (int64_t at = 0; at < n; at += kPanel, panels += g.K * kPanel) rows_of_panel<2>(g, panels, at, int(n - at < kPanel ? n - at : kPanel));
}

// next: what is given to the row at the next step, where no prefetcher of the CPU looks.
static inline void gate_row(const float* given, const float* next, const float* own, const float* before, float* after, int64_t units) {
  for (int64_t j = 0; j < 3 * units; j += 16) __builtin_prefetch(next + j);
  for (int64_t j = 0; j < units; j += kLanes) {
    const int64_t left = units - j;
    const auto sum = [&](int64_t gate) { return load_part(given + gate * units + j, left) + load_part(own + gate * units + j, left); };
    const Floats reset = sigmoid(sum(0)), update = sigmoid(sum(1)), state = load_part(before + j, left);
    const Floats fresh = tanh(load_part(given + 2 * units + j, left) + reset * load_part(own + 2 * units + j, left));
    store_part(after + j, (state - fresh) * update + fresh, left);
  }
}

// How many of the rows a step has.
static inline int64_t rows_at(const Recurrence& r, int64_t t) {
  if (!r.batch_sizes) return r.rows;
  const int64_t left = r.batch_sizes[t] - r.first;
  return left < r.rows ? left : r.rows;
}

// The rows from `begin` on have ended: these are their last states.
static void keep(const Recurrence& r, const float* states, int64_t begin, int64_t end) {
  if (r.last && begin < end) std::memcpy(r.last + begin * r.units, states + begin * r.units, size_t((end - begin) * r.units) * sizeof(float));
}

static void recur(const Recurrence& r) {
  const int64_t wide = 3 * r.units;
  float *own = r.scratch, *panels = turns(r) ? own + wide * r.rows : nullptr;
  Gemm g{r.initial, r.units, r.rows, r.units, r.weight, r.weight_row, r.bias, own, wide};
  if (panels) turn_all(g, wide, panels);
  const float* gates = r.gates;
  float* after = r.states;
  for (int64_t t = 0; t < r.steps; t++) {
    const int64_t rows = rows_at(r, t);
    if (rows <= 0) break;
    keep(r, g.x, rows, g.M);
    g.M = rows;
    multiply(g, wide, panels);
    const int64_t gates_step = r.batch_sizes ? r.batch_sizes[t] * r.gates_row : r.gates_step;
    for (int64_t m = 0; m < rows; m++) {
      const float* given = gates + m * r.gates_row;
      gate_row(given, given + gates_step, own + m * wide, g.x + m * r.units, after + m * r.units, r.units);
    }
    g.x = after;
    gates += gates_step;
    after += r.batch_sizes ? r.batch_sizes[t] * r.units : r.states_step;
  }
  keep(r, g.x, 0, g.M);
}

const Kernels kernels = {recur};

}  // namespace fxopt::FXOPT_ISA
