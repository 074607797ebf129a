// For a rollout whose probabilities are not the trainer's: importance weights, truncated or cut
// off, and rejection of tokens or sequences that are too far off (verl
// trainer/ppo/rollout_corr_helper.py). Functions of the whole batch; nothing here has a gradient.
// d = log p_trainer - log p_rollout of a token, within +-20.
#pragma once

#include <ATen/core/Tensor.h>

#include "trainer/config/ppo_config.h"
#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

struct RolloutCorrection {
  at::Tensor rollout_is_weights{};  // [sequences, response], fp32, 0 where there is no token;
                                    // undefined without rollout_is
  at::Tensor response_mask{};       // [sequences, response]: what is left of it
  Metrics metrics{};                // rollout_corr/*
};

// All [sequences, response]: log-probabilities fp32, mask int64. `config` is one whose rules hold
// (ppo_rules.h). Throws Error(kUsage) for a mask without a token.
RolloutCorrection compute_rollout_correction_and_rejection_mask(
    const at::Tensor& old_log_prob,
    const at::Tensor& rollout_log_prob,
    const at::Tensor& response_mask,
    const RolloutCorrectionSection& config);

}  // namespace ferry::trainer
