#include "trainer/workers/reward_manager.h"

#include <ATen/ops/zeros.h>

#include <chrono>
#include <cmath>
#include <string>
#include <utility>
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

DataProto RewardManager::compute_reward(const DataProto& batch) {
  const auto rows = batch.size();
  const auto responses = batch.tensor("responses").contiguous();
  const auto lengths = batch.tensor("response_mask").sum(1);
  std::vector<RewardRequest> requests;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto index = static_cast<std::size_t>(row);
    const auto* const tokens = responses.const_data_ptr<std::int64_t>() + row * responses.size(1);
    const auto size = static_cast<std::size_t>(lengths[row].item<std::int64_t>());
    requests.push_back({.data_source = batch.column("data_source")[index].get<std::string>(),
                        .solution_str = encoder_.decode({tokens, size}, true),
                        .ground_truth = batch.column("ground_truth")[index].dump(),
                        .extra_info = batch.column("extra_info")[index].dump()});
  }
  const bool judges = command_ || !config_.reward.enable;
  std::vector<RewardScore> scores;
  if (command_) {
    scores = command_->compute_score(requests);
  } else {
    for (std::size_t i = 0; i < requests.size(); ++i)
      scores.push_back(judges ? default_compute_score(requests[i].data_source,
                                                      requests[i].solution_str,
                                                      as_text(batch.column("ground_truth")[i]))
                              : RewardScore{});
  }
  auto values = at::zeros({rows});
  auto penalties = at::zeros({rows});
  std::vector<nlohmann::json> extras;
  const auto& overlong = config_.reward.overlong_buffer;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto index = static_cast<std::size_t>(row);
    require(std::isfinite(scores[index].score), ErrorKind::kCorrupt,
            "reward of an answer to {}: is not finite", requests[index].data_source);
    extras.push_back(judges ? extra_of(scores[index]) : nlohmann::json::object());
    if (format_) {
      const auto earned = format_->compute_score(requests[index].solution_str);
      scores[index].score += earned;
      extras.back()["format"] = earned;
    }
    values[row] = scores[index].score;
    extras.back()["score"] = scores[index].score;
    if (overlong.enable) {
      penalties[row] = overlong_penalty(lengths[row].item<std::int64_t>(),
                                        {.max_resp_len = config_.data.max_response_length,
                                         .len = overlong.len,
                                         .penalty_factor = overlong.penalty_factor});
      extras.back()["overlong_reward"] = penalties[row].item<double>();
      extras.back()["overlong"] = penalties[row].item<double>() < 0 ? 1.0 : 0.0;
    }
  }
  return DataProto({{"scores", values}, {"overlong_reward", penalties}},
                   {{"reward_extra_info", std::move(extras)}});
}

}  // namespace ferry::trainer
