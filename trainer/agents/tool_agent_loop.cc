#include "trainer/agents/tool_agent_loop.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "rollout/text/answer_reader.h"
#include "rollout/text/shallow_json.h"

namespace ferry::trainer {

using nlohmann::json;
using nlohmann::ordered_json;
using rollout::text::ToolCall;

namespace {

// Tells it to the model; texts as they are, all else as JSON.
std::string content_of(const json& answer, const std::string& name) {
  const auto text = [](const json& value) {
    return value.is_string() ? value.get<std::string>()
                             : value.dump(-1, ' ', false, json::error_handler_t::replace);
  };
  if (answer.contains("error"))
    return fmt::format("Error executing tool '{}': {}", name, text(answer["error"]));
  return answer.contains("content") ? text(answer["content"]) : "";
}

// A member of the record's extra_info, or null.
json extra_of(const Session& session, const char* name) {
  if (!session.task.is_object()) return {};
  const auto extra = session.task.find("extra_info");
  return extra != session.task.end() && extra->is_object() ? extra->value(name, json()) : json();
}

// Its place among all calls of the session, in nine characters, as some templates ask for.
std::string call_id(const Session& session, std::size_t call) {
  return fmt::format("call{:03}{:02}", session.assistant_turns, call);
}

}  // namespace

ToolAgentLoop::ToolAgentLoop(Tools tools, const AgentSections& config, const PromptEncoder& encoder)
    : tools_(std::move(tools)),
      config_(config.multi_turn),
      reasoning_(config.reasoning()),
      encoder_(encoder) {}

ordered_json ToolAgentLoop::tools(const Session& session) const {
  return selected_tools(tools_.schemas, Record(extra_of(session, "tool_selection")));
}

std::vector<AgentQuestion> ToolAgentLoop::turn_is_over(Session& session,
                                                       const std::string& text) const {
  const auto schemas = tools(session);
  const auto kwargs = extra_of(session, "tools_kwargs");
  std::vector<std::string> names;
  for (const auto& schema : schemas) names.push_back(schema.at("function").at("name"));
  const auto thoughts = reasoning_
                            ? encoder_.thoughts_behind(session.tokens_before_turn(), *reasoning_)
                            : std::nullopt;
  auto part = rollout::text::read_answer(text, thoughts, config_.format, schemas);
  auto& calls = part.calls;
  calls.resize(std::min(calls.size(), static_cast<std::size_t>(config_.max_parallel_calls)));
  ordered_json message{{"role", "assistant"}, {"content", std::move(part.content)}};
  if (!part.reasoning.empty()) message["reasoning_content"] = std::move(part.reasoning);
  std::vector<AgentQuestion> questions;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto& [name, arguments, id] = calls[i];
    message["tool_calls"].push_back(
        {{"id", id.empty() ? call_id(session, i) : id},
         {"type", "function"},
         {"function",
          {{"name", name}, {"arguments", rollout::text::parse_exact_json(arguments)}}}});
    auto& question = questions.emplace_back(AgentQuestion{
        .body = {
            {"session", session.seed}, {"name", name}, {"arguments", json::parse(arguments)}}});
    const bool is_shown = std::ranges::find(names, name) != names.end();
    const auto found = std::ranges::find(tools_.names, name);
    std::string wide;  // nlohmann would make another number of it
    rollout::text::visit_wide_integers(arguments, [&](const auto& place) {
      wide = place.digits;
      return false;
    });
    if (!wide.empty())
      question.known = json{{"error", fmt::format("{} has more than 64 bits", wide)}};
    else if (!is_shown)
      question.known =
          json{{"error", fmt::format("there is no such tool, but: {}", fmt::join(names, ", "))}};
    else
      question.program = tools_.program_of[static_cast<std::size_t>(found - tools_.names.begin())];
    if (is_shown && kwargs.is_object() && kwargs.contains(name) && !kwargs[name].is_null())
      question.details = json{{"tools_kwargs", kwargs[name]}};
  }
  session.messages.push_back(std::move(message));
  return questions;
}

namespace {

// The answer, or an error in its place if the session cannot earn its reward.
json checked_answer(const Session& session, const json& answer) {
  const auto reward = answer.value("reward", json());
  if (reward.is_null() || (reward.is_number() && session.may_earn(reward.get<double>())))
    return answer;
  return {{"error", fmt::format("its reward is no number, or too large: {}",
                                reward.dump(-1, ' ', false, json::error_handler_t::replace))}};
}

}  // namespace

AgentReply ToolAgentLoop::answered(Session& session, std::span<const json> answers) const {
  const auto calls = session.messages.back().at("tool_calls");
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const auto answer = checked_answer(session, answers[i]);
    const auto name = calls[i].at("function").at("name").get<std::string>();
    session.messages.push_back(
        {{"role", "tool"},
         {"tool_call_id", calls[i].at("id")},
         {"name", name},
         {"content",
          truncated_tool_response(content_of(answer, name), config_.max_tool_response_length,
                                  config_.tool_response_truncate_side)}});
    if (const auto reward = answer.value("reward", json()); !reward.is_null())
      session.earn(session.response.size() - 1, reward.get<double>());
  }
  return {.num_messages = answers.size()};
}

}  // namespace ferry::trainer
