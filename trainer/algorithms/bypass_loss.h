// The policy loss of bypass mode (verl trainer/ppo/core_algos.py compute_policy_loss_bypass_mode),
// where old_log_prob is the rollout's: what the rollout and the policy as it is now differ by is
// weighed, or rejected, anew in every update. d of rollout_corr.h is log_prob - old_log_prob.
#pragma once

#include "trainer/algorithms/policy_loss.h"
#include "trainer/algorithms/rollout_corr.h"

namespace ferry::trainer {

// Differentiable in log_prob. Tokens that are rejected count in what the loss is divided by, as in
// verl. Metrics: those of the loss, and rollout_corr/*, each the mean over what is left of the
// micro-batch, as a share by its tokens; so is what rollout_is_batch_normalize divides by, alone of
// the loss. Throws Error(kUsage), also for a mask without a token.
LossOutput compute_policy_loss_bypass_mode(const PolicyLossInputs& inputs,
                                           const PolicyLossConfig& config,
                                           const RolloutCorrectionSection& bypass,
                                           const GlobalBatchInfo& info);

}  // namespace ferry::trainer
