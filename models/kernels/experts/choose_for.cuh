// The choice of a token's experts by a warp.
#pragma once

#include <cmath>

#include "models/kernels/cuda/cuda_element.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {

constexpr int kMostOfLane = 16;  // logits

// Writes choices and weights of `token`, for choose_experts() of experts.h. kOfLane * kLanes
// experts at most.
template <int kOfLane, typename T>
__device__ void choose_for(std::int64_t token,
                           const T* logits,
                           std::int64_t* experts,
                           T* weights,
                           const ChoicesShape& shape,
                           bool normalize) {
  constexpr unsigned kWarp = 0xffffffff;
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
    largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, offset));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    values[i] = ::expf(values[i] - largest);
    sum += values[i];
  }
  for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kWarp, sum, offset);
    // -1 for experts that are not, or are chosen.
#pragma unroll
  for (int i = 0; i < kOfLane; ++i)
    values[i] = i * kLanes + lane < num_experts ? __fdiv_rn(values[i], sum) : -1.0F;

  const int topk = static_cast<int>(shape.topk);
  float of_lane = 0;  // the probability of choice `lane`
  int chosen = 0;
  float of_chosen = 0;
  for (int choice = 0; choice < topk; ++choice) {
    float best = -1;
    int where = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (values[i] > best) {
        best = values[i];
        where = i * kLanes + lane;
      }
    }
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(kWarp, best, offset);
      const int there = __shfl_xor_sync(kWarp, where, offset);
      if (other > best || (other == best && there < where)) {
        best = other;
        where = there;
      }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (i * kLanes + lane == where) values[i] = -1;
    if (lane == choice) {
      of_lane = best;
      chosen = where;
    }
    of_chosen += best;
  }
  if (lane >= topk) return;
  experts[token * topk + lane] = chosen;
  weights[token * topk + lane] = narrow<T>(normalize ? __fdiv_rn(of_lane, of_chosen) : of_lane);
}

}  // namespace ferry::models::launch
