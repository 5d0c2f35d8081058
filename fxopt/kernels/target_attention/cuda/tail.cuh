// Behind the layers: masks, the softmax and the weighted sum; and which positions the layers are needed for.
#pragma once
#include "record.cuh"

namespace fxopt::target {

// The positions whose score somebody reads: a fill in front of the softmax overwrites the others. In any order.
template <class T>
__device__ __forceinline__ void find_valid(const Attention& a, int row, const Team& team) {
  const int lane = team.thread & 31;
  int fill = 0;
  while (fill < a.tail && a.tail_step[fill].op != kSoftmax && a.tail_step[fill].op != kFill && a.tail_step[fill].op != kFillWhere) fill++;
  const bool fills = fill < a.tail && a.tail_step[fill].op != kSoftmax;
  for (int t = team.thread; t - lane < a.positions; t += team.threads()) {
    const bool valid = t < a.positions && (!fills || (mask_at<T>(a, a.tail_step[fill].mask, row, t) != 0) == (a.tail_step[fill].op == kFill));
    if (t < a.positions) team.score[t] = 0;
    const unsigned all = __ballot_sync(kAll, valid);
    int before = lane == 0 ? atomicAdd(&team.count(), __popc(all)) : 0;
    before = __shfl_sync(kAll, before, 0) + __popc(all & ((1u << lane) - 1));
    if (valid) team.valid(a)[before] = t;
  }
}

// f of all values of a team.
template <class F>
__device__ __forceinline__ float reduced(float x, const Team& team, F f) {
  for (int width = 16; width >= 1; width >>= 1) x = f(x, __shfl_xor_sync(kAll, x, width));
  if (team.warps == 1) return x;
  team.barrier();  // everybody has read what was there before
  if ((team.thread & 31) == 0) team.by_warp()[team.warp()] = x;
  team.barrier();
  x = team.by_warp()[0];
  for (int w = 1; w < team.warps; w++) x = f(x, team.by_warp()[w]);
  return x;
}

// A thread's own positions only, but for what the softmax reduces.
template <class T>
__device__ __forceinline__ void run_tail(const Attention& a, int row, const Team& team) {
  for (int k = 0; k < a.tail; k++) {
    const TailStep& step = a.tail_step[k];
    if (step.op != kSoftmax) {
      for (int t = team.thread; t < a.positions; t += team.threads()) {
        const float x = team.score[t], mask = step.mask >= 0 ? mask_at<T>(a, step.mask, row, t) : 0.0f;
        team.score[t] = step.op == kScale ? x * step.value : step.op == kShift ? x + step.value : step.op == kTimesMask ? x * mask
                      : step.op == kPlusMask ? x + mask : (mask != 0) == (step.op == kFill) ? x : step.value;
      }
      continue;
    }
    float most = -INFINITY, total = 0;
    for (int t = team.thread; t < a.positions; t += team.threads()) most = team.score[t] > most || team.score[t] != team.score[t] ? team.score[t] : most;
    most = reduced(most, team, [](float x, float y) { return y > x || y != y ? y : x; });
    for (int t = team.thread; t < a.positions; t += team.threads()) total += team.score[t] = expf(team.score[t] - most);
    total = reduced(total, team, [](float x, float y) { return x + y; });
    for (int t = team.thread; t < a.positions; t += team.threads()) team.score[t] /= total;
  }
}

// Of all positions: a warp every so many, 16 at once, its lanes the channels.
template <class T>
__device__ __forceinline__ void sum_values(const Attention& a, int row, const Team& team) {
  constexpr int kAtOnce = 16;
  const Operand& x = a.operands[a.values];
  auto* out = static_cast<typename T::Bits*>(const_cast<void*>(a.operands[0].data)) + int64_t(row) * a.width;
  for (int channel = team.thread & 31; channel < a.width; channel += 32) {
    const int64_t from = row * x.strides[0] + channel * x.strides[2];
    float sum = 0;
    for (int t0 = team.warp(); t0 < a.positions; t0 += team.warps * kAtOnce) {
      float values[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int t = t0 + u * team.warps;
        values[u] = load<T>(x.data, from + (t < a.positions ? t : t0) * x.strides[1]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int t = t0 + u * team.warps;
        const float next = fmaf(team.score[t < a.positions ? t : t0], values[u], sum);
        sum = t < a.positions ? next : sum;
      }
    }
    if (team.warps == 1) out[channel] = T::rounded(sum);
    else team.inputs[channel] = sum;
  }
  if (team.warps == 1) return;
  team.barrier();
  for (int channel = team.thread; channel < a.width; channel += team.threads()) {
    float sum = 0;
    for (int w = 0; w < team.warps; w++) sum += team.inputs[(w - team.warp()) * kRows * a.stride + channel];
    out[channel] = T::rounded(sum);
  }
}

}  // namespace fxopt::target
