// The choice of a token's experts by a warp.
#pragma once

#include <cmath>

#include "models/kernels/cuda/weight_lines.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {

constexpr int kMostOfLane = 16;  // logits

// Calls take(choice, expert, value) for the topk largest values of a warp, expert i * kLanes + lane
// in values[i] of a lane, the largest first and equal ones by their number. `taken`, less than all
// that may be chosen, replaces them.
template <int kOfLane, typename Take>
__device__ void take_largest(float (&values)[kOfLane], int topk, float taken, const Take& take) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int choice = 0; choice < topk; ++choice) {
    float best = taken;
    int where = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (values[i] > best) {
        best = values[i];
        where = i * kLanes + lane;
      }
    }
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, offset);
      const int there = __shfl_xor_sync(kAllLanes, where, offset);
      if (other > best || (other == best && there < where)) {
        best = other;
        where = there;
      }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (i * kLanes + lane == where) values[i] = taken;
    take(choice, where, best);
  }
}

// Puts the choices of lanes 0 to topk - 1, the largest first and equal ones by their number, into
// the order of ATen's topk() that does not sort: those above the least by their number, then those
// that equal it.
__device__ inline void order_as_unsorted_topk(float& value, int& expert, int topk) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const float least = __shfl_sync(kAllLanes, value, topk - 1);
  int place = 0;
  for (int i = 0; i < topk; ++i) {
    const float other = __shfl_sync(kAllLanes, value, i);
    const int of_other = __shfl_sync(kAllLanes, expert, i);
    const bool above = other > least;
    place += above == value > least ? of_other < expert : above;
  }
  int from = 0;
  for (int i = 0; i < topk; ++i)
    if (__shfl_sync(kAllLanes, place, i) == lane) from = i;
  value = __shfl_sync(kAllLanes, value, from);
  expert = __shfl_sync(kAllLanes, expert, from);
}

// The same for topk() that sorts these by a bitonic network of 32 places, which is not stable.
__device__ inline void order_as_topk(float& value, int& expert, int topk) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  order_as_unsorted_topk(value, expert, topk);
  bool valid = lane < topk;
  for (int size = 2; size <= kLanes; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, value, stride);
      const int of_other = __shfl_xor_sync(kAllLanes, expert, stride);
      const bool other_valid = __shfl_xor_sync(kAllLanes, valid, stride);
      const bool first = (lane & stride) == 0;
      const bool greater = first ? value > other : other > value;
      const bool first_valid = first ? valid : other_valid;
      const bool second_valid = first ? other_valid : valid;
      const bool ascending = size < kLanes && (lane & size) != 0;
      if (((greater && first_valid) || !second_valid) != ascending) continue;
      value = other;
      expert = of_other;
      valid = other_valid;
    }
  }
}

// The sum of lanes 0 to n - 1 as ATen's sum() adds up a row of n <= 32 numbers: a thread for each
// of the largest power of two of them that there is, and then halves of these.
__device__ inline float sum_as_aten(float value, int n) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  int threads = 1;
  while (threads * 2 <= n) threads *= 2;
  const float behind = __shfl_down_sync(kAllLanes, value, threads);
  if (lane + threads < n) value = __fadd_rn(value, behind);
  for (int offset = threads / 2; offset > 0; offset /= 2)
    value = __fadd_rn(value, __shfl_down_sync(kAllLanes, value, offset));
  return __shfl_sync(kAllLanes, value, 0);
}

// Writes choices and weights of `token`, for choose_experts() of experts.h. kOfLane * kLanes
// experts at most. as_aten: order and sum of the choices are ATen's.
template <int kOfLane, bool as_aten = false, typename T>
__device__ void choose_for(std::int64_t token,
                           const T* logits,
                           std::int64_t* experts,
                           T* weights,
                           const ChoicesShape& shape,
                           bool normalize) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int num_experts = static_cast<int>(shape.experts);
  float values[kOfLane];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int expert = i * kLanes + lane;
    values[i] = expert < num_experts ? widen(logits[token * num_experts + expert]) : -INFINITY;
    largest = fmaxf(largest, values[i]);
  }
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    values[i] = ::expf(values[i] - largest);
    sum += values[i];
  }
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
    // -1 for experts that are not, or are chosen.
#pragma unroll
  for (int i = 0; i < kOfLane; ++i)
    values[i] = i * kLanes + lane < num_experts ? __fdiv_rn(values[i], sum) : -1.0F;

  const int topk = static_cast<int>(shape.topk);
  float of_lane = 0;  // the probability of choice `lane`
  int chosen = 0;
  float of_chosen = 0;
  take_largest<kOfLane>(values, topk, -1, [&](int choice, int expert, float value) {
    of_chosen = __fadd_rn(of_chosen, value);
    if (lane != choice) return;
    of_lane = value;
    chosen = expert;
  });
  if constexpr (as_aten) {
    order_as_topk(of_lane, chosen, topk);
    of_chosen = sum_as_aten(of_lane, topk);
  }
  if (lane >= topk) return;
  experts[token * topk + lane] = chosen;
  weights[token * topk + lane] = narrow<T>(normalize ? __fdiv_rn(of_lane, of_chosen) : of_lane);
}

}  // namespace ferry::models::launch
