// What a batch of PPO says of itself, under verl's names and with its numbers: scores, advantages,
// lengths (verl trainer/ppo/metric_utils.py, compute_data_metrics), and how far apart the rollout
// and the trainer are (utils/debug/metrics.py, calculate_debug_metrics). Columns are verl's, with R
// the longest response and P the longest prompt of the batch: responses [rows, R], response_mask
// [rows, R], attention_mask [rows, P + R]. A number of nothing is NaN.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "models/spec/transformer_config.h"
#include "trainer/algorithms/agg_loss.h"
#include "trainer/metrics/metrics.h"
#include "trainer/update/data_proto.h"

namespace ferry::trainer {

// critic/{score,rewards,advantages,returns}/{mean,max,min}; with a column `values` also of them,
// and critic/vf_explained_var; {prompt_length,response_length,response_length_non_aborted}/{mean,
// max,min,clip_ratio}, clipped being as long as the column is wide; response/aborted_ratio, of
// responses without a token, which scores and rewards leave out.
// Of token_level_scores, token_level_rewards, advantages, returns, values [rows, R].
// Throws Error(kUsage) for a column that is missing.
Metrics compute_data_metrics(const DataProto& batch);

// actor/entropy: of entropys [rows, R] of the policy as it was, put together as losses are.
double compute_entropy(const DataProto& batch, LossAggMode mode, double loss_scale_factor);

// training/rollout_probs_diff_{valid,max,mean,std}: of the absolute difference of a token's
// probability; training/rollout_actor_probs_pearson_corr.
// Of old_log_probs, rollout_log_probs [rows, R].
Metrics calculate_debug_metrics(const DataProto& batch);

// How long the actor took for what it did with a batch, and what its GPUs could do at best.
struct ActorWork {
  std::map<std::string, double> seconds{};  // of the parts of the step: update_actor, old_log_prob
  int ppo_epochs = 1;
  double peak_flops = 0;  // a second, of all its GPUs
};

// perf/mfu/actor of its update, perf/mfu/actor_infer of its log-probabilities, a forward pass: the
// share of the peak that operations by verl's count (models/spec/costs.h) were; of parts that
// exist.
Metrics mfu_metrics(const DataProto& batch,
                    const models::TransformerConfig& actor,
                    const ActorWork& work);

// training/off_policy/trajectory_staleness/{mean,max,min}: by how many updates the weights that
// answered are older than those that learn (verl trainer/ppo/v1/trainer_base.py). Of weights_step
// [rows], the steps behind which the weights were those that answered. Throws Error(kBug) if a
// row's are older than `most`, or younger than `step`.
Metrics staleness_metrics(const DataProto& batch, std::int64_t step, std::int64_t most);

// Of the whole batch, as attention_mask has them.
struct TokenCounts {
  std::int64_t prompt = 0;
  std::int64_t response = 0;
};
TokenCounts count_tokens(const DataProto& batch);

}  // namespace ferry::trainer
