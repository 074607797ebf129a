#include "trainer/algorithms/ppo_loss.h"

#include <ATen/ATen.h>

#include "distckpt/base/error.h"
#include "trainer/algorithms/kl_penalty.h"

namespace ferry::trainer {

LossOutput ppo_loss(const ActorLossInputs& inputs,
                    const ActorLossConfig& config,
                    const GlobalBatchInfo& info) {
  const auto& policy = inputs.policy;
  auto [loss, metrics] = config.rollout_correction.bypass_mode
                             ? compute_policy_loss_bypass_mode(policy, config.policy_loss,
                                                               config.rollout_correction, info)
                             : compute_policy_loss(policy, config.policy_loss, info);
  metrics["actor/pg_loss"] = loss.detach();
  const auto add = [&](const char* name, const at::Tensor& tokens, double factor) {
    const auto term =
        agg_loss(tokens, policy.response_mask, config.policy_loss.loss_agg_mode, info);
    metrics[name] = term.detach();
    loss = loss + factor * term;
  };
  if (inputs.entropy.defined()) add("actor/entropy_loss", inputs.entropy, -config.entropy_coeff);
  if (config.use_kl_loss) {
    require(inputs.ref_log_prob.defined(), ErrorKind::kUsage,
            "ppo_loss: use_kl_loss needs ref_log_prob");
    add("actor/kl_loss", kl_penalty(policy.log_prob, inputs.ref_log_prob, config.kl_loss_type),
        config.kl_loss_coef);
  }
  return {.loss = loss, .metrics = metrics};
}

LossOutput value_loss(const CriticLossInputs& inputs,
                      const CriticLossConfig& config,
                      const GlobalBatchInfo& info) {
  const auto& [vpreds, values, returns, mask] = inputs;
  const auto near = at::maximum(at::minimum(vpreds, values + config.cliprange_value),
                                values - config.cliprange_value);
  const auto plain = (vpreds - returns).pow(2), clipped = (near - returns).pow(2);
  const auto loss = 0.5 * agg_loss(at::maximum(plain, clipped), mask, config.loss_agg_mode, info);
  const auto mean = [&](const at::Tensor& tokens) {
    return agg_loss(tokens.detach(), mask, LossAggMode::kTokenMean, info);
  };
  return {.loss = loss,
          .metrics = {{"critic/vf_loss", loss.detach()},
                      {"critic/vf_clipfrac", mean((clipped > plain).to(vpreds.scalar_type()))},
                      {"critic/vpred_mean", mean(vpreds)}}};
}

}  // namespace ferry::trainer
