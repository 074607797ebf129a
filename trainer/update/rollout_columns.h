// All columns of a rollout batch, for what is done to each of them.
#pragma once

#include <cstdint>
#include <string_view>

#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

enum class Per : std::uint8_t { kRow, kToken, kResponseToken };

// visit(name, per, member) of every column; a member is an at::Tensor, a SamplingMask or a vector.
template <typename Visit>
void each_column(Visit&& visit) {
  using Batch = RolloutBatch;
  visit("tokens", Per::kToken, &Batch::tokens);
  visit("routed_experts", Per::kToken, &Batch::routed_experts);
  visit("response_mask", Per::kResponseToken, &Batch::response_mask);
  visit("rollout_log_probs", Per::kResponseToken, &Batch::rollout_log_probs);
  visit("global_steps", Per::kResponseToken, &Batch::global_steps);
  visit("old_log_probs", Per::kResponseToken, &Batch::old_log_probs);
  visit("ref_log_prob", Per::kResponseToken, &Batch::ref_log_prob);
  visit("log_prob", Per::kResponseToken, &Batch::log_prob);
  visit("entropys", Per::kResponseToken, &Batch::entropys);
  visit("rollout_is_weights", Per::kResponseToken, &Batch::rollout_is_weights);
  visit("values", Per::kResponseToken, &Batch::values);
  visit("token_level_scores", Per::kResponseToken, &Batch::token_level_scores);
  visit("token_level_rewards", Per::kResponseToken, &Batch::token_level_rewards);
  visit("turn_scores", Per::kResponseToken, &Batch::turn_scores);
  visit("advantages", Per::kResponseToken, &Batch::advantages);
  visit("returns", Per::kResponseToken, &Batch::returns);
  visit("sampling_mask", Per::kResponseToken, &Batch::sampling_mask);
  visit("seeds", Per::kRow, &Batch::seeds);
  visit("min_global_steps", Per::kRow, &Batch::min_global_steps);
  visit("max_global_steps", Per::kRow, &Batch::max_global_steps);
  visit("index", Per::kRow, &Batch::index);
  visit("scores", Per::kRow, &Batch::scores);
  visit("overlong_reward", Per::kRow, &Batch::overlong_reward);
  visit("reward_baselines", Per::kRow, &Batch::reward_baselines);
  visit("reward_restarts", Per::kRow, &Batch::reward_restarts);
  visit("uid", Per::kRow, &Batch::uid);
  visit("data_source", Per::kRow, &Batch::data_source);
  visit("ground_truth", Per::kRow, &Batch::ground_truth);
  visit("extra_info", Per::kRow, &Batch::extra_info);
  visit("reward_extra_info", Per::kRow, &Batch::reward_extra_info);
  visit("images", Per::kRow, &Batch::images);
  visit("raw_prompt", Per::kRow, &Batch::raw_prompt);
  visit("agent_name", Per::kRow, &Batch::agent_name);
  visit("replay", Per::kRow, &Batch::replay);
  visit("agent_info", Per::kRow, &Batch::agent_info);
  visit("session", Per::kRow, &Batch::session);
}

// True for a column that stays with its rows wherever they go, and false for one that the rank
// keeps which made it (row_parcels.h). Rank 0 adds up what turns have earned.
inline bool goes_with_rows(Per per, std::string_view name) {
  return per == Per::kRow || name == "turn_scores";
}

inline bool is_known(const at::Tensor& column) {
  return column.defined();
}
inline bool is_known(const models::SamplingMask& column) {
  return column.defined();
}
template <typename T>
bool is_known(const std::vector<T>& column) {
  return !column.empty();
}

}  // namespace ferry::trainer
