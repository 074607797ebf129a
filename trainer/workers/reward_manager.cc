#include "trainer/workers/reward_manager.h"

#include <ATen/ops/zeros.h>

#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/algorithms/overlong_penalty.h"

namespace ferry::trainer {
namespace {

// Rules compare texts.
std::string as_text(const nlohmann::json& ground_truth) {
  return ground_truth.is_string() ? ground_truth.get<std::string>() : ground_truth.dump();
}

// A rule that says nothing but a number says what verl's managers call acc.
nlohmann::json extra_of(const RewardScore& score) {
  nlohmann::json extra = nlohmann::json::object();
  if (score.numbers.empty() && score.texts.empty()) extra["acc"] = score.score;
  for (const auto& [name, value] : score.numbers) extra[name] = value;
  for (const auto& [name, value] : score.texts) extra[name] = value;
  return extra;
}

}  // namespace

RewardManager::RewardManager(const PpoConfig& config, const PromptEncoder& encoder)
    : config_(config), encoder_(encoder) {
  const auto& reward = config.reward;
  if (!reward.format_pattern.empty()) format_.emplace(reward.format_pattern, reward.format_score);
  if (!reward.command.empty())
    command_ = std::make_unique<RewardCommand>(
        RewardCommandOptions{.command = reward.command,
                             .timeout = std::chrono::seconds(reward.command_timeout),
                             .start_timeout = std::chrono::seconds(reward.command_start_timeout),
                             .max_restarts = reward.command_max_restarts});
}

RewardManager::~RewardManager() = default;

std::int64_t RewardManager::num_restarts() const {
  return command_ ? command_->num_restarts() : 0;
}

RolloutBatch RewardManager::compute_reward(const RolloutBatch& batch) {
  const auto rows = static_cast<std::size_t>(batch.size());
  std::vector<RewardRequest> requests;
  for (std::size_t row = 0; row < rows; ++row)
    requests.push_back(
        {.data_source = batch.data_source[row],
         .solution_str = encoder_.decode(batch.response(static_cast<std::int64_t>(row)), true),
         .ground_truth = batch.ground_truth[row].dump(),
         .extra_info = batch.extra_info[row].dump()});
  const auto judges = [&](std::size_t row) {  // an environment needs no rule
    const auto loop = batch.agent_name.empty()
                          ? AgentLoopKind::kSingleTurn
                          : config_.rollout.agents.loop_of(batch.agent_name[row]);
    return command_ || (!config_.reward.enable && loop != AgentLoopKind::kEnv);
  };
  std::vector<RewardScore> scores;
  if (command_) {
    scores = command_->compute_score(requests);
  } else {
    for (std::size_t row = 0; row < rows; ++row)
      scores.push_back(judges(row) ? default_compute_score(requests[row].data_source,
                                                           requests[row].solution_str,
                                                           as_text(batch.ground_truth[row]))
                                   : RewardScore{});
  }
  auto answer = batch.without_columns();
  answer.scores = at::zeros({batch.size()});
  answer.overlong_reward = at::zeros({batch.size()});
  const auto& overlong = config_.reward.overlong_buffer;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto at = static_cast<std::int64_t>(row);
    auto& score = scores[row].score;
    require(std::isfinite(score), ErrorKind::kCorrupt, "reward of an answer to {}: is not finite",
            requests[row].data_source);
    auto& extra = answer.reward_extra_info.emplace_back(judges(row) ? extra_of(scores[row])
                                                                    : nlohmann::json::object());
    if (format_) {
      const auto earned = format_->compute_score(requests[row].solution_str);
      score += earned;
      extra["format"] = earned;
    }
    answer.scores[at] = score;
    extra["score"] = score;
    if (overlong.enable) {
      answer.overlong_reward[at] =
          overlong_penalty(batch.response_length(at), config_.data.max_response_length, overlong);
      const auto penalty = answer.overlong_reward[at].item<double>();  // rounded to fp32
      extra["overlong_reward"] = penalty;
      extra["overlong"] = penalty < 0 ? 1.0 : 0.0;
    }
  }
  return answer;
}

}  // namespace ferry::trainer
