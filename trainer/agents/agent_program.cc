#include "trainer/agents/agent_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/base/printable.h"
#include "rollout/text/shallow_json.h"
#include "trainer/rewards/child_process.h"

namespace ferry::trainer {

using nlohmann::json;

namespace {

// A program that writes without end is read for so long, then its deadlines are looked at.
constexpr std::chrono::milliseconds kMostReading{250};

}  // namespace

json parse_answer(std::string_view text) {
  constexpr std::size_t kShown = 200;
  const auto refuse_if = [&](bool wrong, std::string_view why) {
    require(!wrong, ErrorKind::kCorrupt, "the answer {}: {}", why,
            printable(text.substr(0, kShown)));
  };
  refuse_if(rollout::text::nests_deeply(text), "is nested too deep");
  auto answer = distckpt::json_or_discarded(text);
  refuse_if(!answer.is_object(), "is no JSON object");
  return answer;
}

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

void AgentProgram::hear(const std::string& line, std::vector<AgentAnswer>& answers) {
  auto said = parse_answer(line);
  const bool answers_one = said.contains("id") && said["id"].is_number_integer() &&
                           close(said["id"].get<std::int64_t>());
  require(answers_one, ErrorKind::kCorrupt,
          "the program answered something else than it was asked");
  const auto id = said["id"].get<std::int64_t>();
  said.erase("id");
  answers.push_back({id, std::move(said)});
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
  try {
    converse(wait, answers);
  } catch (const Error& error) {
    std::ranges::move(give_up(error.what()), std::back_inserter(answers));
  }
  return answers;
}

void AgentProgram::converse(std::chrono::milliseconds wait, std::vector<AgentAnswer>& answers) {
  const auto until = Clock::now() + wait;
  while (process_ && (!open_.empty() || !unsent_.empty())) {
    std::string_view unsent = unsent_;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const auto line =
        process_->exchange(unsent, answers.empty() ? std::max(left, std::chrono::milliseconds(0))
                                                   : std::chrono::milliseconds(0));
    const bool sent = unsent.size() < unsent_.size();
    unsent_.erase(0, unsent_.size() - unsent.size());
    const auto now = Clock::now();
    if (line) {
      hear(*line, answers);
      if (now < until + kMostReading) continue;
    }
    if (process_->ended()) fail(ErrorKind::kIo, "the program ended ({})", *process_->ended());
    require(std::ranges::none_of(open_, [&](const auto& one) { return one.second <= now; }),
            ErrorKind::kIo, "no answer within {} s",
            static_cast<double>(options_.timeout.count()) / 1000);
    if (!answers.empty() || (!sent && now >= until) || line) return;
  }
}

}  // namespace ferry::trainer
