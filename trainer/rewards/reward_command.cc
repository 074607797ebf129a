#include "trainer/rewards/reward_command.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "rollout/text/unicode/unicode.h"
#include "trainer/rewards/child_process.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

std::string shown(const std::string& line) {
  constexpr std::size_t kMost = 200;
  return rollout::text::replace_invalid_utf8(line.substr(0, kMost)) +
         (line.size() > kMost ? "..." : "");
}

// Throws if the line is no answer: `why`, something that it lacks.
void refuse(bool wrong, const std::string& line, std::string_view why) {
  if (wrong)
    throw Error(
        ErrorKind::kCorrupt, fmt::format("{}: {}", why, shown(line)),
        "each line of standard output is {\"id\": ..., \"score\": ...}; print anything else to "
        "standard error");
}

RewardScore score_of(const json& answer, const std::string& line) {
  refuse(answer.contains("error"), line, "the program reports an error");
  refuse(
      !answer.contains("score") || !(answer["score"].is_number() || answer["score"].is_boolean()),
      line, "no number is the score");
  const auto number = [](const json& value) {
    return value.is_boolean() ? (value.get<bool>() ? 1.0 : 0.0) : value.get<double>();
  };
  RewardScore result{.score = number(answer["score"])};
  refuse(!(std::abs(result.score) <= std::numeric_limits<float>::max()), line,
         "the score is beyond float32");
  for (const auto& [name, value] : answer.items()) {
    if (name == "id" || name == "score") continue;
    if (value.is_number() || value.is_boolean())
      result.numbers[name] = number(value);
    else
      result.texts[name] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return result;
}

json parsed(const std::string& text, std::string_view what) {
  auto value = distckpt::json_or_discarded(text);
  require(!value.is_discarded(), ErrorKind::kUsage, "reward request: {} is no JSON: {}", what,
          shown(text));
  return value;
}

}  // namespace

RewardCommand::RewardCommand(RewardCommandOptions options) : options_(std::move(options)) {
  require(!options_.command.empty(), ErrorKind::kUsage, "reward command: is empty");
}

RewardCommand::~RewardCommand() = default;
RewardCommand::RewardCommand(RewardCommand&&) noexcept = default;
RewardCommand& RewardCommand::operator=(RewardCommand&&) noexcept = default;

void RewardCommand::start() {
  process_ = std::make_unique<ChildProcess>(options_.command);
  has_answered_ = false;
  heard_ = Clock::now();
  unsent_.clear();
  sent_ = 0;
  for (const auto& [id, question] : unanswered_) send(id, question);
}

void RewardCommand::send(std::int64_t id, const Question& question) {
  unsent_ += fmt::format("{{\"id\":{},{}\n", id, std::string_view(question.line).substr(1));
}

void RewardCommand::ask(std::size_t number, const RewardRequest& request) {
  json question{{"data_source", request.data_source},
                {"solution_str", request.solution_str},
                {"ground_truth", parsed(request.ground_truth, "ground_truth")},
                {"extra_info", parsed(request.extra_info, "extra_info")},
                {"prompt", request.prompt},
                {"prompt_ids", request.prompt_ids},
                {"response_ids", request.response_ids},
                {"finish_reason", request.finish_reason},
                {"num_turns", request.num_turns}};
  if (auto messages = parsed(request.messages, "messages"); !messages.is_null())
    question["messages"] = std::move(messages);
  if (unanswered_.empty()) {
    num_asked_ = 0;
    heard_ = Clock::now();
  }
  ++num_asked_;
  const auto id = next_id_++;
  const auto& kept = unanswered_[id] = {
      .number = number,
      .line = question.dump(-1, ' ', true, json::error_handler_t::replace),
      .shown = fmt::format("{}: {}", request.data_source, shown(request.solution_str))};
  if (process_)
    send(id, kept);
  else
    start();
}

std::string RewardCommand::converse(std::chrono::milliseconds wait,
                                    std::vector<std::pair<std::size_t, RewardScore>>& scores) {
  const auto limit = has_answered_ ? options_.timeout : options_.start_timeout;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(heard_ + limit - Clock::now());
  auto unsent = std::string_view(unsent_).substr(sent_);
  const auto size = unsent.size();
  const auto line =
      process_->exchange(unsent, std::clamp(left, std::chrono::milliseconds(0), wait));
  sent_ += size - unsent.size();
  if (unsent.empty()) {
    unsent_.clear();
    sent_ = 0;
  }
  if (!line) {
    if (process_->ended()) return fmt::format("ended ({})", *process_->ended());
    if (unsent.size() < size) heard_ = Clock::now();  // it is asked only now
    if (Clock::now() - heard_ < limit) return "";
    return fmt::format("said nothing for {} s", static_cast<double>(limit.count()) / 1000);
  }
  json answer;
  try {
    answer = distckpt::parse_json(*line, "its answer");
  } catch (const Error&) {  // refused, as null is
  }
  refuse(!answer.is_object(), *line, "no JSON object");
  refuse(!answer.contains("id") || !answer["id"].is_number_integer(), *line, "no id");
  const auto asked = unanswered_.find(answer["id"].get<std::int64_t>());
  refuse(asked == unanswered_.end(), *line, "nothing of this id is to be answered");
  scores.emplace_back(asked->second.number, score_of(answer, *line));
  unanswered_.erase(asked);
  has_answered_ = true;
  failures_ = 0;
  heard_ = Clock::now();
  return "";
}

void RewardCommand::start_again(const std::string& trouble) {
  process_.reset();
  // One that has answered something has failed once.
  ++failures_;
  require(failures_ <= options_.max_restarts, ErrorKind::kIo,
          "it {}, {} times in a row, and left {} of {} answers unscored, the first of {}", trouble,
          failures_, unanswered_.size(), num_asked_, unanswered_.begin()->second.shown);
  ++num_restarts_;
  start();
}

std::vector<std::pair<std::size_t, RewardScore>> RewardCommand::answers(
    std::chrono::milliseconds wait) {
  std::vector<std::pair<std::size_t, RewardScore>> scores;
  const auto until = Clock::now() + wait;
  try {
    while (!unanswered_.empty()) {
      const auto before = scores.size();
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
      const std::chrono::milliseconds none(0);
      const auto unsent = unsent_.size() - sent_;
      const auto trouble = converse(scores.empty() ? std::max(left, none) : none, scores);
      if (!trouble.empty()) start_again(trouble);
      const bool moves =
          scores.size() > before || unsent_.size() - sent_ < unsent || !trouble.empty();
      if (!moves && (!scores.empty() || Clock::now() >= until)) break;
    }
  } catch (Error& error) {
    process_.reset();
    unanswered_.clear();
    failures_ = 0;
    error.add_context(fmt::format("asking the reward command {}", options_.command));
    throw;
  }
  return scores;
}

std::vector<RewardScore> RewardCommand::compute_score(std::span<const RewardRequest> requests) {
  std::vector<RewardScore> scores(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) ask(i, requests[i]);
  while (num_unanswered() > 0)
    for (auto& [number, score] : answers(std::chrono::seconds(1)))
      scores[number] = std::move(score);
  return scores;
}

}  // namespace ferry::trainer
