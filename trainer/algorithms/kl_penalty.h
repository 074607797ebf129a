// The divergence of the policy from the reference, token by token, estimated from the probability
// of the token that was drawn (J. Schulman, "Approximating KL Divergence", 2020; verl
// trainer/ppo/core_algos.py kl_penalty); as a penalty on rewards, and how large a penalty.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trainer/config/ppo_config.h"
#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

// All [sequences, response], fp32. Differentiable in logprob.
at::Tensor kl_penalty(const at::Tensor& logprob, const at::Tensor& ref_logprob, KlPenalty kind);

// The factor of the penalty: fixed, or adaptive (D. M. Ziegler et al., arXiv:1909.08593, 2.2).
class KlController {
 public:
  // Throws Error(kUsage) for a horizon or a target that is not positive.
  explicit KlController(const KlCtrlConfig& control);

  double value() const { return value_; }
  // value *= 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) n_steps / horizon
  void update(double current_kl, std::int64_t n_steps);
  void restore(double value) { value_ = value; }  // of a checkpoint

 private:
  KlCtrlConfig control_;
  double value_;
};

struct PenalizedRewards {
  at::Tensor token_level_rewards{};  // [sequences, response]
  Metrics metrics{};                 // actor/reward_kl_penalty, actor/reward_kl_penalty_coeff
};

// Rewards = scores - value() x divergence; then the controller learns the mean divergence of a
// sequence (verl trainer/ppo/ray_trainer.py apply_kl_penalty). A function of the whole batch, all
// [sequences, response].
PenalizedRewards apply_kl_penalty(const at::Tensor& token_level_scores,
                                  const at::Tensor& old_log_probs,
                                  const at::Tensor& ref_log_prob,
                                  const at::Tensor& response_mask,
                                  KlPenalty kind,
                                  KlController& controller);

}  // namespace ferry::trainer
