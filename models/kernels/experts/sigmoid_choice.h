// The choice of experts by sigmoids of their logits, among the best groups of experts (DeepSeek-V3
// and the families after it).
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>

#include "models/kernels/experts/experts.h"

namespace ferry::models {

struct SigmoidChoice {
  std::int64_t topk = 0;
  std::int64_t groups = 1;      // of neighbouring experts, all of one size
  std::int64_t group_topk = 1;  // groups that a token's experts may be of
  double scaling_factor = 1;
  auto operator<=>(const SigmoidChoice&) const = default;  // NOLINT(modernize-use-nullptr)
};

// scores [tokens, experts] with those of all but the `group_topk` best groups set to `hidden`;
// group_scores [tokens, groups].
at::Tensor limit_to_groups(const at::Tensor& scores,
                           const at::Tensor& group_scores,
                           std::int64_t group_topk,
                           double hidden);

// The experts of the largest scores [tokens, experts], sigmoids in fp32, plus `bias` [experts]
// where it is defined, by operations of ATen, which have transformers' bits. A group's score is the
// sum of its two largest. int64 [tokens, topk], in the order of topk().
at::Tensor experts_by_scores(const at::Tensor& scores,
                             const at::Tensor& bias,
                             const SigmoidChoice& choice);
// The scores of `experts` [tokens, topk], divided by their sum and scaled.
at::Tensor weights_by_scores(const at::Tensor& scores,
                             const at::Tensor& experts,
                             const SigmoidChoice& choice);

// Both in one kernel, of logits [tokens, experts] in fp32 on a GPU. Not differentiable.
ChosenExperts choose_by_sigmoid(const at::Tensor& logits,
                                const at::Tensor& bias,
                                const SigmoidChoice& choice);
// True if choose_by_sigmoid() takes that many experts: at most kMostChosenFrom, in at most 32
// groups, and at most 32 choices. In kBitwise also only where its bits are those of
// experts_by_scores() and weights_by_scores(): compared once, outside of CUDA graphs.
bool chooses_by_sigmoid(std::int64_t experts,
                        const SigmoidChoice& choice,
                        at::Device device,
                        Alignment alignment);

}  // namespace ferry::models
