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
// A program that hangs or ends again and again would keep all questions behind for as many times.
constexpr int kMostRestarts = 2;  // with no answer in between

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
  open_[id] = {.question = question, .asked = Clock::now()};
  put(id, std::move(question));
}

bool AgentProgram::close(std::int64_t id) {
  if (open_.erase(id) == 0) return false;
  last_answered_ = std::max(last_answered_, id);
  heard_ = Clock::now();
  num_silent_ = 0;
  return true;
}

bool AgentProgram::is_late(std::int64_t id) {
  if (late_.erase(id) == 0) return false;
  heard_ = Clock::now();
  num_silent_ = 0;
  return true;
}

void AgentProgram::put(std::int64_t id, json question) {
  question["id"] = id;
  send(question);
}

void AgentProgram::hear(const std::string& line, std::vector<AgentAnswer>& answers) {
  auto said = parse_answer(line);
  const bool has_id = said.contains("id") && said["id"].is_number_integer();
  const auto id = has_id ? said["id"].get<std::int64_t>() : 0;
  if (has_id && is_late(id)) return;
  require(has_id && close(id), ErrorKind::kCorrupt,
          "the program answered something else than it was asked");
  said.erase("id");
  answers.push_back({id, std::move(said)});
}

void AgentProgram::tell(const json& notice) {
  if (process_) send(notice);
}

void AgentProgram::stop() {
  unsent_.clear();
  process_.reset();
  late_.clear();
  last_answered_ = std::numeric_limits<std::int64_t>::min();
  heard_ = {};
}

void AgentProgram::ask_again() {
  auto rest = std::exchange(open_, {});
  stop();
  for (auto& [id, open] : rest) ask(id, std::move(open.question));
}

// Gives the process up. The first question that is open was in its hands, unless it has answered
// later ones: then it may be any.
void AgentProgram::break_off(const std::string& why, std::vector<AgentAnswer>& answers) {
  const bool knows_which =
      !options_.keeps_sessions && !open_.empty() && open_.begin()->first > last_answered_;
  if (knows_which && num_silent_ < kMostRestarts) {
    ++num_silent_;
    answers.push_back({open_.begin()->first, {{"error", why}}});
    open_.erase(open_.begin());
    return ask_again();
  }
  for (const auto& [id, open] : open_) answers.push_back({id, {{"error", why}}});
  open_.clear();
  stop();
  num_silent_ = 0;
}

std::string AgentProgram::too_late() const {
  return fmt::format("no answer within {} s", static_cast<double>(options_.timeout.count()) / 1000);
}

AgentProgram::OpenQuestions::iterator AgentProgram::time_out(OpenQuestions::iterator one,
                                                             std::vector<AgentAnswer>& answers) {
  const auto id = one->first;
  answers.push_back({id, {{"error", too_late()}, {"timed_out", true}}});
  const auto next = open_.erase(one);
  timed_out(id);
  return next;
}

// Ends the questions whose time is over.
void AgentProgram::end_late(Clock::time_point now, std::vector<AgentAnswer>& answers) {
  const auto is_over = [&](Clock::time_point since) { return now - since >= options_.timeout; };
  for (auto one = open_.begin(); one != open_.end() && one->first < last_answered_;)
    one = is_over(one->second.asked) ? time_out(one, answers) : std::next(one);
  const auto hanging = open_.upper_bound(last_answered_);
  if (hanging == open_.end() || !is_over(std::max(hanging->second.asked, heard_))) return;
  const int most = options_.keeps_sessions ? 1 : kMostRestarts;
  require(std::exchange(num_silent_, num_silent_ + 1) < most, ErrorKind::kIo, "{}", too_late());
  time_out(hanging, answers);
  heard_ = now;
  if (!options_.keeps_sessions) ask_again();
}

std::vector<AgentAnswer> AgentProgram::answers(std::chrono::milliseconds wait) {
  std::vector<AgentAnswer> answers;
  try {
    converse(wait, answers);
  } catch (const Error& error) {
    break_off(error.what(), answers);
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
    end_late(now, answers);
    if (!answers.empty() || (!sent && now >= until) || line) return;
  }
}

}  // namespace ferry::trainer
