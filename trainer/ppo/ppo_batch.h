// What becomes of the batch of a PPO step between the calls of workers, on rank 0: functions of its
// columns alone. Columns are verl's; a group is the answers to one prompt, and has one uid.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "trainer/algorithms/kl_penalty.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/metrics.h"
#include "trainer/update/data_proto.h"

namespace ferry::trainer {

struct PromptBatchOptions {
  std::int64_t n = 1;        // rows of each prompt, one behind the other
  std::int64_t width = 0;    // of the column, in tokens
  std::string uid_prefix{};  // of the groups: "<prefix><number>"
  std::uint64_t key = 0;     // of the draws: each row's seed is a function of it and the row
};

// prompts, attention_mask [rows, width], seeds [rows]; uid, data_source, ground_truth, extra_info.
DataProto prompt_batch(std::span<const EncodedPrompt> prompts, const PromptBatchOptions& options);

// Both, with one attention_mask of prompts and answers.
DataProto with_answers(const DataProto& prompts, const DataProto& answers);

// The names, and those of `more` that the batch has as columns.
std::vector<std::string> with_given(std::vector<std::string> names,
                                    const DataProto& batch,
                                    std::initializer_list<const char*> more);

// [rows], as a column of the answer's tokens: at its last one.
at::Tensor at_last_token(const at::Tensor& scores, const at::Tensor& response_mask);

// The groups in which the metric differs between the answers (DAPO's dynamic sampling,
// arXiv:2503.14476, 3.2): "reward", "seq_reward" and "seq_final_reward" are the sum of
// token_level_scores, others a number of reward_extra_info. Throws Error(kUsage) if rewards have no
// such number.
DataProto varied_groups(const DataProto& batch, const std::string& metric);

// [rows], the number of each row's group, in the order of their first rows.
std::vector<std::int64_t> group_index(const DataProto& batch);

// The order in which chunk(dp) gives each of dp ranks its part of every mini-batch of `mini_batch`
// rows, which are those that follow each other in the batch, whatever dp; `balanced`: parts have
// about the same work, else the same rows follow each other in them, too.
std::vector<std::int64_t> mini_batches_of_ranks(const DataProto& batch,
                                                std::int64_t mini_batch,
                                                std::int64_t dp,
                                                bool balanced);

// The rows of `epochs` epochs behind each other, each epoch in an order of its own, out of `key`.
DataProto shuffled_epochs(const DataProto& batch, int epochs, std::uint64_t key);

// token_level_scores -> token_level_rewards, with the divergence from the reference if it is asked
// for, and advantages, returns; before, but for bypass_mode, what rollout correction makes of
// response_mask and rollout_is_weights.
void add_advantages(DataProto& batch, const PpoConfig& config, KlController& kl, Metrics& metrics);

}  // namespace ferry::trainer
