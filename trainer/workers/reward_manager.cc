#include "trainer/workers/reward_manager.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/shallow_json.h"
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

RewardCommandOptions command_options(const RewardConfig& reward) {
  return {.command = reward.command,
          .timeout = std::chrono::seconds(reward.command_timeout),
          .start_timeout = std::chrono::seconds(reward.command_start_timeout),
          .max_restarts = reward.command_max_restarts};
}

}  // namespace

RewardManager::RewardManager(const PpoConfig& config, const PromptEncoder& encoder)
    : config_(config), encoder_(encoder) {
  const auto& reward = config.reward;
  if (!reward.format_pattern.empty()) format_.emplace(reward.format_pattern, reward.format_score);
  if (!reward.command.empty() && !reward.scores_early())
    command_ = std::make_unique<RewardCommand>(command_options(reward));
}

RewardManager::~RewardManager() = default;

void RewardManager::use_workers(int share) {
  pool_ = std::make_unique<RewardPool>(command_options(config_.reward), share);
}

std::int64_t RewardManager::num_restarts() const {
  return command_ ? command_->num_restarts() : 0;
}

bool scores_by_rule(const RewardConfig& reward, AgentLoopKind loop) {
  return reward.command.empty() && !reward.enable && loop != AgentLoopKind::kEnv &&
         loop != AgentLoopKind::kProgram;
}

bool RewardManager::judges(AgentLoopKind loop) const {
  return !config_.reward.command.empty() || scores_by_rule(config_.reward, loop);
}

void RewardManager::describe(RewardRequest& request,
                             std::span<const std::int64_t> prompt,
                             std::span<const std::int64_t> response) const {
  const auto ends = encoder_.eos_token_ids();
  const bool stopped = !response.empty() && std::ranges::find(ends, response.back()) != ends.end();
  request.solution_str = encoder_.decode(response, true);
  request.prompt = encoder_.decode(prompt, true);
  request.prompt_ids = {prompt.begin(), prompt.end()};
  request.response_ids = {response.begin(), response.end()};
  request.finish_reason = stopped ? "stop" : "length";
}

RewardRequest RewardManager::request(const RolloutBatch& batch, std::int64_t row) const {
  const auto index = static_cast<std::size_t>(row);
  RewardRequest request{.data_source = batch.data_source[index],
                        .ground_truth = batch.ground_truth[index].dump(),
                        .extra_info = batch.extra_info[index].dump()};
  describe(request, batch.prompt(row), batch.response(row));
  if (!batch.agent_info.empty() && command_) {
    request.num_turns = batch.agent_info[index].at("num_turns");
    request.messages = batch.agent_info[index].at("messages").dump();
  }
  return request;
}

RewardRequest RewardManager::request(const Session& session) const {
  std::vector<std::int64_t> response;
  for (const auto& token : session.response) response.push_back(token.token_id);
  RewardRequest request{.data_source = session.task.at("data_source"),
                        .ground_truth = session.task.at("ground_truth").dump(),
                        .extra_info = session.task.at("extra_info").dump()};
  describe(request, session.prompt, response);
  if (config_.rollout.agents.enabled()) {
    request.num_turns = session.num_turns();
    request.messages = conversation_of(session, encoder_).dump();
  }
  return request;
}

RolloutBatch RewardManager::compute_reward(const RolloutBatch& batch) {
  std::vector<RewardRequest> requests;
  for (std::int64_t row = 0; row < batch.size(); ++row) requests.push_back(request(batch, row));
  std::vector<AgentLoopKind> loops(requests.size(), AgentLoopKind::kSingleTurn);
  if (!batch.agent_name.empty())
    std::ranges::transform(batch.agent_name, loops.begin(), [&](const std::string& name) {
      return config_.rollout.agents.loop_of(name);
    });
  if (command_) return rewards_of(batch, loops, command_->compute_score(requests));
  std::vector<RewardScore> scores;
  for (std::size_t row = 0; row < requests.size(); ++row)
    scores.push_back(judges(loops[row]) ? default_compute_score(requests[row].data_source,
                                                                requests[row].solution_str,
                                                                as_text(batch.ground_truth[row]))
                                        : RewardScore{});
  return rewards_of(batch, loops, std::move(scores));
}

void RewardManager::session_is_over(const Session& session) {
  pool_->ask(session.seed, request(session));
}

void RewardManager::finish(RolloutBatch& batch, std::span<const Session> sessions) {
  std::vector<std::size_t> seeds;
  std::vector<AgentLoopKind> loops;
  for (const auto& session : sessions) {
    seeds.push_back(session.seed);
    loops.push_back(session.loop);
    batch.data_source.push_back(session.task.at("data_source"));
  }
  batch.take(rewards_of(batch, loops, pool_->take_scores(seeds)));
  batch.reward_restarts = at::zeros({batch.size()}, at::kLong);
  if (batch.size() > 0)
    batch.reward_restarts[0] =
        pool_->num_restarts() - std::exchange(told_restarts_, pool_->num_restarts());
}

RolloutBatch RewardManager::rewards_of(const RolloutBatch& batch,
                                       std::span<const AgentLoopKind> loops,
                                       std::vector<RewardScore> scores) const {
  const auto rows = static_cast<std::size_t>(batch.size());
  auto answer = batch.without_columns();
  answer.scores = at::zeros({batch.size()});
  answer.overlong_reward = at::zeros({batch.size()});
  const auto& overlong = config_.reward.overlong_buffer;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto at = static_cast<std::int64_t>(row);
    auto& score = scores[row].score;
    require(std::isfinite(score), ErrorKind::kCorrupt, "reward of an answer to {}: is not finite",
            batch.data_source[row]);
    auto& extra = answer.reward_extra_info.emplace_back(
        judges(loops[row]) ? extra_of(scores[row]) : nlohmann::json::object());
    if (format_) {
      const auto earned = format_->compute_score(encoder_.decode(batch.response(at), true));
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

nlohmann::json conversation_of(const Session& session, const PromptEncoder& encoder) {
  // Reward programs have the numbers of JSON, of 64 bits.
  auto messages = nlohmann::json::parse(rollout::text::json_text(session.messages));
  if (!messages.empty() && messages.back().at("role") == "assistant") return messages;
  std::vector<std::int64_t> said;
  for (auto at = session.turn_begin; at < session.response.size(); ++at)
    said.push_back(session.response[at].token_id);
  messages.push_back({{"role", "assistant"}, {"content", encoder.decode(said, true)}});
  return messages;
}

}  // namespace ferry::trainer
