// The batch of a PPO step between the calls of workers: functions of its columns alone.
// A group is the responses to one prompt, and has one uid.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trainer/algorithms/kl_penalty.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/metrics.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

struct PromptBatchOptions {
  std::int64_t n = 1;           // rows of each prompt, one behind the other
  std::string uid_prefix{};     // of the groups: "<prefix><number>"
  bool keeps_messages = false;  // also in raw_prompt, with agent_name, for agents
  bool keeps_images = false;    // of models that see
  std::uint64_t key = 0;        // of the draws: each row's seed is a function of it and the row
};

// Prompts without responses, with seeds, uid, data_source, ground_truth, extra_info and the limits
// of `data`. Throws Error(kBug) for a prompt without a token, or beyond the limit.
RolloutBatch prompt_batch(std::span<const EncodedPrompt> prompts,
                          const PpoDataConfig& data,
                          const PromptBatchOptions& options);

// [rows] -> [response tokens]: at the last token of each response, whatever the mask says of it
// (verl's reward managers). A response without a token has none.
at::Tensor at_last_token(const at::Tensor& scores, const RolloutBatch& batch);

// [response tokens]: scores at the last tokens, and what the turns of sessions have earned.
at::Tensor token_level_scores(const RolloutBatch& batch);
// [rows]: their sums.
at::Tensor sequence_scores(const RolloutBatch& batch);

// reward_extra_info of sessions with what their turns have earned: on top of each "score", and with
// num_turns and what an environment has said besides.
void add_session_info(RolloutBatch& batch);

// The groups in which the metric differs between the responses (DAPO's dynamic sampling,
// arXiv:2503.14476, 3.2): kWholeRewards are sequence_scores(), others a number of
// reward_extra_info. Throws Error(kUsage) if rewards have no such number.
RolloutBatch varied_groups(const RolloutBatch& batch, const std::string& metric);

// [rows], the number of each row's group, in the order of their first rows.
std::vector<std::int64_t> group_index(const RolloutBatch& batch);

// scores, turn_scores -> token_level_scores -> token_level_rewards, with the divergence from the
// reference if the configuration asks for it; advantages, returns; before, but for bypass_mode,
// rollout correction: a smaller response_mask, rollout_is_weights.
void add_advantages(RolloutBatch& batch,
                    const PpoConfig& config,
                    KlController& kl,
                    Metrics& metrics);

}  // namespace ferry::trainer
