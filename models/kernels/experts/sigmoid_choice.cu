#include <cmath>

#include "models/kernels/experts/choose_for.cuh"
#include "models/kernels/experts/expert_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kTokens = 4;  // of a block
constexpr int kMostExperts = kMostOfLane * kLanes;

// The sigmoid, as ATen computes it.
__device__ float sigmoid_of(float logit) {
  return __fdiv_rn(1.0F, __fadd_rn(1.0F, ::expf(-logit)));
}

// A mask of the best groups of a warp's `ranked` experts: lane g has group g.
__device__ unsigned best_groups(const float* ranked, const SigmoidShape& shape) {
  const int lane = static_cast<int>(threadIdx.x);
  const int groups = static_cast<int>(shape.groups);
  const int size = static_cast<int>(shape.choices.experts) / groups;
  float first = -INFINITY;
  float second = -INFINITY;
  if (lane < groups) {
    for (int i = 0; i < size; ++i) {
      const float value = ranked[lane * size + i];
      second = fmaxf(second, fminf(first, value));
      first = fmaxf(first, value);
    }
  }
  const float score = __fadd_rn(first, second);
  int better = 0;
  for (int group = 0; group < groups; ++group) {
    const float other = __shfl_sync(kAllLanes, score, group);
    better += other > score || (other == score && group < lane);
  }
  return __ballot_sync(kAllLanes, lane < groups && better < static_cast<int>(shape.group_topk));
}

// A warp chooses for one token.
__global__ void __launch_bounds__(kTokens* kLanes) choose_by_sigmoid(const float* logits,
                                                                     const float* bias,
                                                                     std::int64_t* experts,
                                                                     float* weights,
                                                                     SigmoidShape shape) {
  __shared__ float of_tokens[kTokens][kMostExperts];
  const int lane = static_cast<int>(threadIdx.x);
  const int num_experts = static_cast<int>(shape.choices.experts);
  const int topk = static_cast<int>(shape.choices.topk);
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kTokens + threadIdx.y;
  release_dependents();
  wait_for_inputs();
  if (token >= shape.choices.tokens) return;
  const float* const of_token = logits + token * num_experts;
  float values[kMostOfLane];
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    const int expert = i * kLanes + lane;
    values[i] = -INFINITY;
    if (expert >= num_experts) continue;
    const float score = sigmoid_of(of_token[expert]);
    values[i] = bias == nullptr ? score : __fadd_rn(score, bias[expert]);
  }
  if (shape.groups > 1) {
    float* const ranked = of_tokens[threadIdx.y];
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i)
      if (i * kLanes + lane < num_experts) ranked[i * kLanes + lane] = values[i];
    __syncwarp();
    const unsigned best = best_groups(ranked, shape);
    const int size = num_experts / static_cast<int>(shape.groups);
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) {
      const int expert = i * kLanes + lane;
      if (expert < num_experts && (best >> expert / size & 1) == 0) values[i] = -INFINITY;
    }
  }
  float of_lane = 0;
  int chosen = 0;
  take_largest<kMostOfLane>(values, topk, -INFINITY, [&](int choice, int expert, float value) {
    if (lane != choice) return;
    chosen = expert;
    of_lane = value;
  });
  order_as_unsorted_topk(of_lane, chosen, topk);
  const float score = lane < topk ? sigmoid_of(of_token[chosen]) : 0.0F;
  const float sum = __fadd_rn(sum_as_aten(score, topk), 1e-20F);
  if (lane >= topk) return;
  experts[token * topk + lane] = chosen;
  weights[token * topk + lane] = __fmul_rn(__fdiv_rn(score, sum), shape.scaling_factor);
}

}  // namespace

bool sigmoid_choice_supported(const SigmoidShape& shape) {
  const auto& [tokens, topk, experts] = shape.choices;
  return experts <= kMostExperts && topk <= std::min<std::int64_t>(experts, kLanes) &&
         shape.groups <= kLanes && experts % shape.groups == 0 &&
         (shape.groups == 1 || experts / shape.groups >= 2) &&
         topk <= experts / shape.groups * shape.group_topk;
}

cudaError_t choose_by_sigmoid(const float* logits,
                              const float* bias,
                              std::int64_t* experts,
                              float* weights,
                              const SigmoidShape& shape,
                              cudaStream_t stream) {
  if (!sigmoid_choice_supported(shape)) return cudaErrorInvalidValue;
  return launch_dependent(choose_by_sigmoid,
                          static_cast<unsigned>(ceil_div(shape.choices.tokens, kTokens)),
                          dim3(kLanes, kTokens), 0, stream, logits, bias, experts, weights, shape);
}

}  // namespace ferry::models::launch
