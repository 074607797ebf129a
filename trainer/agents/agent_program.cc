#include "trainer/agents/agent_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "trainer/rewards/child_process.h"

namespace ferry::trainer {

using nlohmann::json;

AgentProgram::AgentProgram(AgentProgramOptions options) : options_(std::move(options)) {}
AgentProgram::~AgentProgram() = default;

void AgentProgram::send(const json& line) {
  unsent_ += line.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
}

void AgentProgram::ask(std::int64_t id, json question) {
  if (!process_) {
    process_ = std::make_unique<ChildProcess>(options_.command);
    begin();
  }
  open_[id] = Clock::now() + options_.timeout;
  put(id, std::move(question));
}

void AgentProgram::put(std::int64_t id, json question) {
  question["id"] = id;
  send(question);
}

std::string AgentProgram::hear(const std::string& line, std::vector<AgentAnswer>& answers) {
  auto said = json::parse(line, nullptr, /*allow_exceptions=*/false);
  const bool answers_one = said.is_object() && said.contains("id") &&
                           said["id"].is_number_integer() && close(said["id"].get<std::int64_t>());
  if (!answers_one) return "the program answered something else than it was asked";
  const auto id = said["id"].get<std::int64_t>();
  said.erase("id");
  answers.push_back({id, std::move(said)});
  return "";
}

void AgentProgram::tell(const json& notice) {
  if (process_) send(notice);
}

std::vector<AgentAnswer> AgentProgram::give_up(const std::string& why) {
  std::vector<AgentAnswer> answers;
  for (const auto& [id, deadline] : open_) answers.push_back({id, {{"error", why}}});
  open_.clear();
  unsent_.clear();
  process_.reset();
  return answers;
}

std::vector<AgentAnswer> AgentProgram::answers(std::chrono::milliseconds wait) {
  std::vector<AgentAnswer> answers;
  const auto until = Clock::now() + wait;
  while (process_ && (!open_.empty() || !unsent_.empty())) {
    std::string_view unsent = unsent_;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const auto line =
        process_->exchange(unsent, answers.empty() ? std::max(left, std::chrono::milliseconds(0))
                                                   : std::chrono::milliseconds(0));
    const bool sent = unsent.size() < unsent_.size();
    unsent_.erase(0, unsent_.size() - unsent.size());
    if (line) {
      const auto trouble = hear(*line, answers);
      if (trouble.empty()) continue;
      std::ranges::move(give_up(trouble), std::back_inserter(answers));
      return answers;
    }
    if (process_->ended()) {
      std::ranges::move(give_up(fmt::format("the program ended ({})", *process_->ended())),
                        std::back_inserter(answers));
      return answers;
    }
    const auto now = Clock::now();
    const auto late = [&](const auto& one) { return one.second <= now; };
    if (std::ranges::any_of(open_, late)) {
      std::ranges::move(give_up(fmt::format("no answer within {} s",
                                            static_cast<double>(options_.timeout.count()) / 1000)),
                        std::back_inserter(answers));
      return answers;
    }
    if (!answers.empty() || (!sent && now >= until)) return answers;
  }
  return answers;
}

}  // namespace ferry::trainer
