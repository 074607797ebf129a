#include "trainer/algorithms/bypass_loss.h"

#include <ATen/ATen.h>

namespace ferry::trainer {
namespace {

LossOutput reinforce(const PolicyLossInputs& in,
                     PolicyLossConfig config,
                     const GlobalBatchInfo& info) {
  config.loss_mode = LossMode::kGpg;  // -A log_prob, weighed
  auto output = compute_policy_loss(in, config, info);
  output.metrics["actor/ppo_kl"] = agg_loss((in.old_log_prob - in.log_prob).detach(),
                                            in.response_mask, LossAggMode::kTokenMean, info);
  return output;
}

}  // namespace

LossOutput compute_policy_loss_bypass_mode(const PolicyLossInputs& inputs,
                                           const PolicyLossConfig& config,
                                           const RolloutCorrectionSection& bypass,
                                           const GlobalBatchInfo& info) {
  const auto mask = inputs.response_mask.to(at::kLong);
  const auto corrected = compute_rollout_correction_and_rejection_mask(
      inputs.log_prob, inputs.old_log_prob, mask, bypass);
  const bool weighs = bypass.loss_type == BypassLoss::kReinforce;
  auto in = inputs;
  in.response_mask = corrected.response_mask;
  in.rollout_is_weights = weighs ? corrected.rollout_is_weights : at::Tensor();
  auto output = weighs ? reinforce(in, config, info) : compute_policy_loss(in, config, info);

  const auto tokens = mask.sum();
  const auto left = in.response_mask.sum();
  for (auto& [name, value] : output.metrics) value = value * (tokens / left.clamp_min(1));
  const auto share = tokens.to(at::kFloat) / static_cast<double>(info.batch_num_tokens);
  for (const auto& [name, value] : corrected.metrics) output.metrics[name] = value * share;
  return output;
}

}  // namespace ferry::trainer
