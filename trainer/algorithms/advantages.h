// Advantages: how much better each token was than expected. Functions of the whole batch, for
// outcomes: R of a sequence is the sum of its tokens' rewards; a group is the samples of one
// prompt. Formulas, defaults and what becomes of groups of one are those of verl
// trainer/ppo/core_algos.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

struct AdvantageInputs {
  at::Tensor token_level_rewards{};       // [sequences, response], fp32
  at::Tensor response_mask{};             // [sequences, response], int64 or bool
  std::span<const std::int64_t> index{};  // [sequences], the group of each: all but gae,
                                          // reinforce_plus_plus and remax
  at::Tensor values{};                    // [sequences, response]: gae
  at::Tensor reward_baselines{};          // [sequences]: remax
  // Read by gigpo and grpo_turns: token ids, and which of them are the model's, learned or not.
  std::vector<std::vector<std::int64_t>> prompts{};  // of sequences
  at::Tensor responses{};                            // [sequences, response], int64
  at::Tensor turn_mask{};                            // [sequences, response]
};

struct Advantages {
  at::Tensor advantages{};  // [sequences, response], fp32
  at::Tensor returns{};     // the same; what a critic learns
};

// No gradients. Throws Error(kUsage) for an input that is missing, and of grpo_passk for a group of
// one.
Advantages compute_advantage(const AdvantageInputs& inputs, const AlgorithmConfig& config);

}  // namespace ferry::trainer
