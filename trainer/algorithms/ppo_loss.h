// The losses of a PPO update of actor and critic, put together of their terms (verl
// workers/utils/losses.py ppo_loss and value_loss). Tensors [sequences, response], fp32, of one
// micro-batch; losses and metrics are shares of the mini-batch and add up.
#pragma once

#include <ATen/core/Tensor.h>

#include "trainer/algorithms/bypass_loss.h"
#include "trainer/algorithms/policy_loss.h"

namespace ferry::trainer {

struct ActorLossConfig {  // actor.*
  PolicyLossConfig policy_loss{};
  RolloutCorrectionSection rollout_correction{};  // in bypass_mode: old_log_prob is the rollout's
  double entropy_coeff = 0;
  bool use_kl_loss = false;
  double kl_loss_coef = 1e-3;
  KlPenalty kl_loss_type{};
};

struct ActorLossInputs {
  PolicyLossInputs policy{};
  at::Tensor entropy{};       // of the policy at each token; undefined: no term
  at::Tensor ref_log_prob{};  // with use_kl_loss
};

// Policy loss - entropy_coeff x entropy + kl_loss_coef x divergence from the reference, each
// aggregated by loss_agg_mode. Adds metrics actor/pg_loss, actor/entropy_loss, actor/kl_loss.
LossOutput ppo_loss(const ActorLossInputs& inputs,
                    const ActorLossConfig& config,
                    const GlobalBatchInfo& info);

struct CriticLossConfig {  // critic.*
  double cliprange_value = 0.5;
  LossAggMode loss_agg_mode = LossAggMode::kTokenMean;
};

struct CriticLossInputs {
  at::Tensor vpreds{};  // of the critic as it is now
  at::Tensor values{};  // as it was when advantages were computed
  at::Tensor returns{};
  at::Tensor response_mask{};  // int64 or bool
};

// max((v - returns)^2, (v within values +- cliprange_value - returns)^2) / 2, aggregated
// (J. Schulman's PPO code; verl core_algos.py compute_value_loss). Differentiable in vpreds.
// Metrics: critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean.
LossOutput value_loss(const CriticLossInputs& inputs,
                      const CriticLossConfig& config,
                      const GlobalBatchInfo& info);

}  // namespace ferry::trainer
