#include "trainer/agents/env_agent_loop.h"

#include <chrono>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::trainer {

using nlohmann::json;

namespace {

void refuse_answer(bool wrong, const json& answer, std::string_view why) {
  require(!wrong, ErrorKind::kCorrupt, "the environment: {}: {}", why,
          answer.dump(-1, ' ', false, json::error_handler_t::replace));
}

// The observation, which goes to the messages; nothing if there is none.
std::optional<std::string> observation_of(const json& answer) {
  refuse_answer(answer.contains("error"), answer, "it reports an error");
  const auto found = answer.find("observation");
  if (found == answer.end() || found->is_null()) return std::nullopt;
  refuse_answer(!found->is_string(), answer, "an observation is text");
  return found->get<std::string>();
}

}  // namespace

std::vector<AgentProgramOptions> EnvAgentLoop::programs() const {
  const bool is_remote = !config_.env_url.empty();
  return {{.command = is_remote ? config_.env_url : config_.env_command,
           .timeout = std::chrono::seconds(config_.env_timeout),
           .protocol = is_remote ? AgentProtocol::kHttp : AgentProtocol::kLines,
           .keeps_sessions = true}};
}

std::vector<AgentQuestion> EnvAgentLoop::begin(const Session& session) const {
  auto body = session.task;
  body["method"] = "reset";
  body["session"] = session.seed;
  return {{.body = std::move(body)}};
}

AgentReply EnvAgentLoop::begun(Session& session, std::span<const json> answers) const {
  const auto observation = observation_of(answers.front());
  if (observation) session.messages.push_back({{"role", "user"}, {"content", *observation}});
  return {.num_messages = observation ? std::size_t{1} : 0};
}

std::vector<AgentQuestion> EnvAgentLoop::turn_is_over(Session& session,
                                                      const std::string& text) const {
  session.messages.push_back({{"role", "assistant"}, {"content", text}});
  return {{.body = {{"method", "step"}, {"session", session.seed}, {"action", text}}}};
}

AgentReply EnvAgentLoop::answered(Session& session, std::span<const json> answers) const {
  const auto& answer = answers.front();
  if (session.times_out(answer)) return {.is_cut_off = true};
  const auto observation = observation_of(answer);
  const auto reward = answer.value("reward", json(0)), done = answer.value("done", json(false));
  refuse_answer(!reward.is_number(), answer, "a reward is a number");
  refuse_answer(!done.is_boolean(), answer, "done is true or false");
  if (reward != 0) session.earn(session.response.size() - 1, reward.get<double>());
  const auto info = answer.find("info");
  if (info != answer.end() && info->is_object()) session.extra_info.update(*info);
  if (done.get<bool>()) return {};
  refuse_answer(!observation, answer, "it is not done, and says nothing");
  session.messages.push_back({{"role", "user"}, {"content", *observation}});
  return {.num_messages = 1};
}

std::optional<json> EnvAgentLoop::cut_off(const Session& session) const {
  return json{{"method", "close"}, {"session", session.seed}};
}

}  // namespace ferry::trainer
