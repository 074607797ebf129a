// Metrics of a batch of PPO, under verl's names and with its numbers: scores, advantages, lengths
// (verl trainer/ppo/metric_utils.py, compute_data_metrics), and how far apart the rollout and the
// trainer are (utils/debug/metrics.py, calculate_debug_metrics). A number of nothing is NaN.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "models/spec/transformer_config.h"
#include "trainer/algorithms/agg_loss.h"
#include "trainer/metrics/metrics.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

// critic/{score,rewards,advantages,returns}/{mean,max,min}; if values are known, also of them, and
// critic/vf_explained_var; {prompt_length,response_length,response_length_non_aborted}/{mean,max,
// min,clip_ratio}, clipped being as long as the batch allows; response/aborted_ratio, of responses
// without a token, which scores and rewards leave out. Reads token_level_scores,
// token_level_rewards, advantages and returns. Throws Error(kUsage) if one is not known.
Metrics compute_data_metrics(const RolloutBatch& batch);

// actor/entropy: entropys of the policy as it was, aggregated as losses are.
double compute_entropy(const RolloutBatch& batch, LossAggMode mode, double loss_scale_factor);

// training/rollout_probs_diff_{valid,max,mean,std}: of the absolute difference of a token's
// probability; training/rollout_actor_probs_pearson_corr. Reads old_log_probs, rollout_log_probs.
Metrics calculate_debug_metrics(const RolloutBatch& batch);

// The time that the actor took for a batch, and the best that its GPUs could do.
struct ActorWork {
  std::map<std::string, double> seconds{};  // of the parts of the step: update_actor, old_log_prob
  int ppo_epochs = 1;
  double peak_flops = 0;  // a second, of all its GPUs
};

// perf/mfu/actor of its update, perf/mfu/actor_infer of its log-probabilities, a forward pass: the
// share of the peak that operations by verl's count (models/spec/costs.h) were; of parts that
// exist.
Metrics mfu_metrics(const RolloutBatch& batch,
                    const models::TransformerConfig& actor,
                    const ActorWork& work);

// training/off_policy/trajectory_staleness/{mean,max,min}: by how many updates the newest weights
// that drew a token of an answer are older than those that learn, which are behind `step`; with
// `partial` also trajectory_staleness_worst/..., of the oldest, and trajectory_spans/..., how many
// weights drew an answer (verl trainer/ppo/v1/trainer_base.py). Throws Error(kBug) if a row's are
// older than `most`, or younger than `step`.
Metrics staleness_metrics(const RolloutBatch& batch,
                          std::int64_t step,
                          std::int64_t most,
                          bool partial);

// Tokens of all rows, those that the mask lacks included.
struct TokenCounts {
  std::int64_t prompt = 0;
  std::int64_t response = 0;
};
TokenCounts count_tokens(const RolloutBatch& batch);

}  // namespace ferry::trainer
