// For a rollout whose probabilities are not the trainer's: importance weights, truncated or cut
// off, and rejection of tokens or sequences that are too far off (verl
// trainer/ppo/rollout_corr_helper.py). Functions of the whole batch; nothing here has a gradient.
// d = log p_trainer - log p_rollout of a token, within +-20.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "trainer/config/ppo_choices.h"
#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

struct RolloutCorrectionConfig {  // algorithm.rollout_correction; names are verl's
  RolloutIs rollout_is = RolloutIs::kNone;
  // "2.0": at most so much (TIS, F. Yao et al., "Your efficient RL framework secretly brings you
  // off-policy RL training", 2025). "0.5_5.0": 0 outside (IcePop, Ling team, 2025).
  std::string rollout_is_threshold = "2.0";
  bool rollout_is_batch_normalize = false;  // divided by their mean
  // Rejection: "" (none), or some of token_k1 token_k2 token_k3 seq_sum_k1 seq_sum_k2 seq_sum_k3
  // seq_mean_k1 seq_mean_k2 seq_mean_k3 seq_max_k2 seq_max_k3, comma separated; what one of them
  // rejects is rejected. k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
  std::string rollout_rs{};
  // One for all, or one for each, comma separated: "0.5_2.0" or "2.0" (which is 0.5_2.0) for k1,
  // between whose logarithms it must be; "0.01" for others, which must not exceed it.
  std::string rollout_rs_threshold{};
};

struct RolloutCorrection {
  at::Tensor rollout_is_weights{};  // [sequences, response], fp32, 0 where there is no token;
                                    // undefined without rollout_is
  at::Tensor response_mask{};       // [sequences, response]: what is left of it
  Metrics metrics{};                // rollout_corr/*
};

// All [sequences, response]: log-probabilities fp32, mask int64. Throws Error(kUsage) for a
// configuration that means nothing, and for a mask without a token.
RolloutCorrection compute_rollout_correction_and_rejection_mask(
    const at::Tensor& old_log_prob,
    const at::Tensor& rollout_log_prob,
    const at::Tensor& response_mask,
    const RolloutCorrectionConfig& config);

}  // namespace ferry::trainer
