#include "trainer/algorithms/advantages.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/algorithms/masked.h"
#include "trainer/algorithms/turn_advantages.h"

namespace ferry::trainer {
namespace {

constexpr double kEpsilon = 1e-6;

// The sequences of each group, in their order.
std::vector<at::Tensor> groups_of(const AdvantageInputs& in) {
  const auto sequences = static_cast<std::size_t>(in.token_level_rewards.size(0));
  require(in.index.size() == sequences, ErrorKind::kUsage,
          "advantages: groups of {} sequences are known, expected {}", in.index.size(), sequences);
  std::map<std::int64_t, std::vector<std::int64_t>> members;
  for (std::size_t i = 0; i < sequences; ++i)
    members[in.index[i]].push_back(static_cast<std::int64_t>(i));
  std::vector<at::Tensor> groups;
  for (const auto& [group, of_group] : members)
    groups.push_back(at::tensor(of_group, in.token_level_rewards.options().dtype(at::kLong)));
  return groups;
}

// Statistics of each sequence's group.
struct GroupStatistics {
  at::Tensor mean{};  // [sequences]
  at::Tensor std{};
  at::Tensor size{};  // fp32
};

GroupStatistics statistics(const at::Tensor& scores, const std::vector<at::Tensor>& groups) {
  GroupStatistics result{
      .mean = at::zeros_like(scores), .std = at::ones_like(scores), .size = at::ones_like(scores)};
  for (const auto& group : groups) {
    if (group.numel() == 1) continue;
    const auto of_group = scores.index_select(0, group);
    result.mean.index_fill_(0, group, of_group.mean());
    result.std.index_fill_(0, group, of_group.std());
    result.size.index_fill_(0, group, static_cast<double>(group.numel()));
  }
  return result;
}

at::Tensor rewards_to_go(const AdvantageInputs& in) {
  return (in.token_level_rewards * in.response_mask).flip({-1}).cumsum(-1).flip({-1});
}

Advantages gae(const AdvantageInputs& in, const AlgorithmConfig& config) {
  require(in.values.defined(), ErrorKind::kUsage, "advantages: gae needs values");
  const auto mask = in.response_mask.to(at::kLong);
  const auto length = mask.size(1);
  auto next_value = at::zeros_like(in.values.select(1, 0)), next_advantage = next_value;
  std::vector<at::Tensor> reversed;
  for (auto t = length; t-- > 0;) {
    const auto value = in.values.select(1, t), here = mask.select(1, t);
    const auto delta = in.token_level_rewards.select(1, t) + config.gamma * next_value - value;
    const auto advantage = delta + config.gamma * config.lam * next_advantage;
    // Tokens that were not generated pass on what they are given.
    next_value = value * here + (1 - here) * next_value;
    next_advantage = advantage * here + (1 - here) * next_advantage;
    reversed.push_back(next_advantage);
  }
  const auto advantages = at::stack(reversed, 1).flip({1});
  return {.advantages = masked_whiten(advantages, mask), .returns = advantages + in.values};
}

Advantages reinforce_plus_plus(const AdvantageInputs& in, const AlgorithmConfig& config) {
  const auto mask = in.response_mask.to(at::kLong);
  auto running = at::zeros_like(in.token_level_rewards.select(1, 0));
  std::vector<at::Tensor> reversed;
  for (auto t = mask.size(1); t-- > 0;) {
    const auto here = mask.select(1, t);
    const auto discounted = in.token_level_rewards.select(1, t) + config.gamma * running;
    reversed.push_back(discounted * here);
    running = reversed.back() + running * (1 - here);
  }
  const auto returns = at::stack(reversed, 1).flip({1});
  return {.advantages = masked_whiten(returns, mask) * mask, .returns = returns};
}

Advantages remax(const AdvantageInputs& in) {
  require(in.reward_baselines.defined(), ErrorKind::kUsage,
          "advantages: remax needs reward_baselines");
  const auto returns = rewards_to_go(in);
  return {.advantages = returns - in.reward_baselines.unsqueeze(-1) * in.response_mask,
          .returns = returns};
}

at::Tensor opo_baseline(const at::Tensor& scores,
                        const at::Tensor& mask,
                        const std::vector<at::Tensor>& groups) {
  const auto lengths = mask.sum(-1);
  auto baseline = at::zeros_like(scores);
  for (const auto& group : groups) {
    if (group.numel() == 1) continue;
    const auto length = lengths.index_select(0, group);
    baseline.index_fill_(0, group, (length * scores.index_select(0, group)).sum() / length.sum());
  }
  return baseline;
}

at::Tensor passk(const at::Tensor& scores, const std::vector<at::Tensor>& groups, bool normalize) {
  auto result = at::zeros_like(scores);
  for (const auto& group : groups) {
    require(group.numel() >= 2, ErrorKind::kUsage,
            "advantages: grpo_passk needs at least 2 samples of each prompt");
    const auto of_group = scores.index_select(0, group);
    const auto [best, places] = of_group.topk(2);
    auto advantage = best[0] - best[1];
    if (normalize) advantage = advantage / (of_group.std() + kEpsilon);
    result.index_fill_(0, group.index_select(0, places.slice(0, 0, 1)), advantage);
  }
  return result;
}

// Estimators that give all tokens of a sequence the same.
at::Tensor of_sequences(const AdvantageInputs& in, const AlgorithmConfig& config) {
  const auto scores = in.token_level_rewards.sum(-1);
  const auto groups = groups_of(in);
  const auto group = statistics(scores, groups);
  switch (config.adv_estimator) {
    case AdvantageEstimator::kGrpo:
      return config.norm_adv_by_std_in_grpo ? (scores - group.mean) / (group.std + kEpsilon)
                                            : scores - group.mean;
    case AdvantageEstimator::kRloo: {
      const auto others = (group.size - 1).clamp_min(1);
      return scores * group.size / others - group.mean * group.size / others;
    }
    case AdvantageEstimator::kReinforcePlusPlusBaseline:
      return scores - group.mean;
    case AdvantageEstimator::kOpo:
      return scores - opo_baseline(scores, in.response_mask, groups);
    case AdvantageEstimator::kGpg:
      return scores.count_nonzero().clamp_min(1).reciprocal() * scores.size(0) *
             (scores - group.mean);
    case AdvantageEstimator::kGrpoPassk:
      return passk(scores, groups, config.norm_adv_by_std_in_grpo);
    default:
      fail(ErrorKind::kBug, "advantages: not one of whole sequences");
  }
}

}  // namespace

Advantages compute_advantage(const AdvantageInputs& inputs, const AlgorithmConfig& config) {
  const at::NoGradGuard no_grad;
  const auto estimator = config.adv_estimator;
  require(inputs.token_level_rewards.sizes() == inputs.response_mask.sizes(), ErrorKind::kUsage,
          "advantages: rewards and response mask differ in shape");
  if (estimator == AdvantageEstimator::kGae) return gae(inputs, config);
  if (estimator == AdvantageEstimator::kReinforcePlusPlus)
    return reinforce_plus_plus(inputs, config);
  if (estimator == AdvantageEstimator::kRemax) return remax(inputs);
  if (looks_at_turns(estimator)) {
    const auto of_turns = estimator == AdvantageEstimator::kGigpo
                              ? gigpo_advantage(inputs, config)
                              : grpo_turns_advantage(inputs, config);
    return {.advantages = of_turns, .returns = of_turns};
  }
  const auto mask = inputs.response_mask.to(at::kLong);
  auto advantages = of_sequences(inputs, config).unsqueeze(-1) * mask;
  if (estimator == AdvantageEstimator::kReinforcePlusPlusBaseline)
    advantages = masked_whiten(advantages, mask) * mask;
  return {.advantages = advantages, .returns = advantages};
}

}  // namespace ferry::trainer
