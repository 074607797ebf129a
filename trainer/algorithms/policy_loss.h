// Losses of the policy: each one of verl trainer/ppo/core_algos.py under its name there. All
// tensors are [sequences, response], fp32, of one micro-batch; with context parallelism, of whole
// sequences. A is the advantage, d = log_prob - old_log_prob, r = exp(d), sg stops the gradient;
// every loss is multiplied by rollout_is_weights where there are some.
//
// The loss and its metrics are shares of the mini-batch: they add up over micro-batches and ranks.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

#include "trainer/algorithms/agg_loss.h"
#include "trainer/algorithms/loss_output.h"
#include "trainer/config/ppo_choices.h"

namespace ferry::trainer {

// The losses clip_cov and kl_cov change the tokens whose advantages and log-probabilities vary
// together the most.
constexpr bool needs_cov_tokens(LossMode mode) {
  return mode == LossMode::kClipCov || mode == LossMode::kKlCov;
}

struct PolicyLossConfig {  // actor.*, actor.policy_loss.*
  LossMode loss_mode = LossMode::kVanilla;
  LossAggMode loss_agg_mode = LossAggMode::kTokenMean;
  double clip_ratio_low = 0.2;
  double clip_ratio_high = 0.2;
  double clip_ratio_c = 3;  // vanilla; above 1
  double tau_pos = 1;       // sapo
  double tau_neg = 1.05;
  double clip_cov_ratio = 2e-4;  // clip_cov: of the tokens, drawn from those whose covariance is
  double clip_cov_lb = 1;        // above this
  double clip_cov_ub = 5;        // and below this
  double kl_cov_ratio = 2e-4;    // kl_cov: of the tokens
  double ppo_kl_coef = 0.1;
};

struct PolicyLossInputs {
  at::Tensor old_log_prob{};
  at::Tensor log_prob{};
  at::Tensor advantages{};
  at::Tensor response_mask{};       // int64 or bool
  at::Tensor rollout_is_weights{};  // undefined: none
  at::Tensor cov_tokens{};          // bool, the micro-batch's part of select_cov_tokens()
};

// Differentiable in log_prob. Metrics: actor/ppo_kl, of most losses actor/pg_clipfrac and
// actor/pg_clipfrac_lower: means over the tokens of the mini-batch. Throws Error(kUsage).
LossOutput compute_policy_loss(const PolicyLossInputs& inputs,
                               const PolicyLossConfig& config,
                               const GlobalBatchInfo& info);

// The tokens that clip_cov draws, or kl_cov takes, bool. Covariances are against means, and the
// tokens a share, of all that is given: so give it the whole mini-batch, with log_prob from a
// forward pass of it, and the losses do not depend on the cut into micro-batches. (verl takes each
// micro-batch by itself.) clip_cov draws from `generator`, or from the global one, on the host.
at::Tensor select_cov_tokens(const PolicyLossInputs& mini_batch,
                             const PolicyLossConfig& config,
                             std::optional<at::Generator> generator = {});

}  // namespace ferry::trainer
