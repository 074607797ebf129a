// Metrics of a rollout correction, by their names in verl's trainer/ppo/rollout_corr_helper.py
// (compute_offpolicy_metrics, compute_is_metrics, compute_rs_metrics), without "rollout_corr/".
// Tensors [sequences, response] unless it says otherwise; mask int64.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "trainer/metrics/metrics.h"

namespace ferry::trainer {

// The distance of the policies: kl, k3_kl, training_ppl, rollout_ppl, log_ppl_diff, chi2_token,
// ...
Metrics compute_offpolicy_metrics(const at::Tensor& old_log_prob,
                                  const at::Tensor& rollout_log_prob,
                                  const at::Tensor& response_mask);

struct ImportanceWeights {
  at::Tensor weights{};    // as they are used
  at::Tensor raw{};        // before the threshold
  at::Tensor log_ratio{};  // of tokens; of sequences [sequences, 1]
  bool of_sequences = false;
  double upper = 0;
  std::optional<double> lower{};  // nothing: 1 / upper, for metrics
};

// rollout_is_mean, rollout_is_std, rollout_is_eff_sample_size, rollout_is_seq_mean, ...
Metrics compute_is_metrics(const ImportanceWeights& is, const at::Tensor& response_mask);

struct RejectionStatistic {
  std::string option{};      // "seq_mean_k1"
  at::Tensor of_tokens{};    // of its sequence, where it is one of sequences
  at::Tensor of_sequence{};  // [sequences]; undefined where it is one of tokens
  double upper = 0;          // of k1: logarithms
  std::optional<double> lower{};
};

// rollout_rs_<option>_mean, ..._max, ..._fraction_high, ...
Metrics compute_rs_metrics(const RejectionStatistic& rs, const at::Tensor& response_mask);

}  // namespace ferry::trainer
