// The rewards of a batch's answers, by the rule of their data_source, or a program, or neither,
// where a model judges instead of the rules; on top of it what their form earns, and DAPO's penalty
// for length (verl's reward managers naive and dapo).
#pragma once

#include <memory>
#include <optional>

#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/rewards/reward_command.h"
#include "trainer/rewards/reward_score.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

class RewardManager {
 public:
  // The encoder outlives this.
  RewardManager(const PpoConfig& config, const PromptEncoder& encoder);
  ~RewardManager();

  // Reads responses, data_source, ground_truth and extra_info. Returns scores, with the format's
  // and without the length's; reward_extra_info (an object: "score", the same, and what the rule
  // says beside, or "acc", the rule's number, if that is all); overlong_reward. Throws
  // Error(kUsage) for data without a rule, and the error of a program that fails.
  RolloutBatch compute_reward(const RolloutBatch& batch);

  std::int64_t num_restarts() const;  // of the program

 private:
  const PpoConfig& config_;
  const PromptEncoder& encoder_;
  std::optional<FormatReward> format_;
  std::unique_ptr<RewardCommand> command_;
};

}  // namespace ferry::trainer
