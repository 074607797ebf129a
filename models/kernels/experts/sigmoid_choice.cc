#include "models/kernels/experts/sigmoid_choice.h"

#include <ATen/ATen.h>

#include <limits>
#include <tuple>

namespace ferry::models {

at::Tensor limit_to_groups(const at::Tensor& scores,
                           const at::Tensor& group_scores,
                           std::int64_t group_topk,
                           double hidden) {
  const auto groups = group_scores.size(1);
  const auto experts = scores.size(1);
  const auto best =
      std::get<1>(at::topk(group_scores, group_topk, -1, /*largest=*/true, /*sorted=*/false));
  const auto mask = at::zeros_like(group_scores).scatter(1, best, 1);
  const auto of_experts =
      mask.unsqueeze(-1).expand({-1, groups, experts / groups}).reshape({-1, experts});
  return scores.masked_fill(of_experts.to(at::kBool).logical_not(), hidden);
}

at::Tensor experts_by_scores(const at::Tensor& scores,
                             const at::Tensor& bias,
                             const SigmoidChoice& choice) {
  auto ranked = bias.defined() ? scores + bias : scores;
  if (choice.groups > 1) {
    const auto grouped = ranked.view({-1, choice.groups, scores.size(1) / choice.groups});
    const auto best_two = std::get<0>(at::topk(grouped, 2, -1)).sum(-1);
    ranked = limit_to_groups(ranked, best_two, choice.group_topk,
                             -std::numeric_limits<double>::infinity());
  }
  return std::get<1>(at::topk(ranked, choice.topk, -1, /*largest=*/true, /*sorted=*/false));
}

at::Tensor weights_by_scores(const at::Tensor& scores,
                             const at::Tensor& experts,
                             const SigmoidChoice& choice) {
  const auto chosen = scores.gather(1, experts);
  return chosen / (chosen.sum(-1, /*keepdim=*/true) + 1e-20) * choice.scaling_factor;
}

}  // namespace ferry::models
