// The rewards of a batch's answers, by the rule of their data_source, or a program, or neither,
// where a model judges instead of the rules; on top of it what their form earns, and DAPO's penalty
// for length (verl's reward managers naive and dapo).
//
// If the program is several workers (reward_model.num_workers), each answer is asked about when it
// is complete, by the rank that has it, while others are being written: verl's reward loop. The
// scores are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "trainer/agents/session.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/timeline.h"
#include "trainer/rewards/reward_command.h"
#include "trainer/rewards/reward_pool.h"
#include "trainer/rewards/reward_score.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

// True if the rule of its data_source scores an answer: an environment and a program need none.
bool scores_by_rule(const RewardConfig& reward, AgentLoopKind loop);

class RewardManager {
 public:
  // The encoder outlives this.
  RewardManager(const PpoConfig& config, const PromptEncoder& encoder);
  ~RewardManager();

  // Reads responses, data_source, ground_truth, extra_info, agent_name and agent_info. Returns
  // scores, with the format's and without the length's; reward_extra_info (an object: "score", the
  // same, and what the rule says beside, or "acc", the rule's number, if that is all);
  // overlong_reward. Throws Error(kUsage) for data without a rule, and the error of a program that
  // fails.
  RolloutBatch compute_reward(const RolloutBatch& batch);
  std::int64_t num_restarts() const;  // of the program that compute_reward() asks

  // The same while answers are being written, if RewardConfig::scores_early(). `share` workers of
  // this rank, at least one, are asked about each session that is over.
  void use_workers(int share);
  void session_is_over(const Session& session);
  void poll() { pool_->poll(); }
  // Adds the columns of compute_reward() to a batch of these sessions, and reward_restarts. Others
  // that are over stay asked.
  void finish(RolloutBatch& batch, std::span<const Session> sessions);
  // Spans from question to answer, of all since this was called last.
  std::vector<Span> take_spans() { return pool_->take_spans(); }

 private:
  bool judges(AgentLoopKind loop) const;
  RewardRequest request(const Session& session) const;
  RewardRequest request(const RolloutBatch& batch, std::int64_t row) const;
  void describe(RewardRequest& request,
                std::span<const std::int64_t> prompt,
                std::span<const std::int64_t> response) const;
  // `loops`: of the rows.
  RolloutBatch rewards_of(const RolloutBatch& batch,
                          std::span<const AgentLoopKind> loops,
                          std::vector<RewardScore> scores) const;

  const PpoConfig& config_;
  const PromptEncoder& encoder_;
  std::optional<FormatReward> format_;
  std::unique_ptr<RewardCommand> command_;
  std::unique_ptr<RewardPool> pool_;
  std::int64_t told_restarts_ = 0;  // of the pool's
};

// The conversation of a session that is over, with the last answer also where limits cut it off.
nlohmann::json conversation_of(const Session& session, const PromptEncoder& encoder);

}  // namespace ferry::trainer
