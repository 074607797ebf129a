#include "trainer/rewards/reward_command.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "distckpt/base/error.h"
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
  refuse(!std::isfinite(result.score), line, "the score is not finite");
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
  auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  require(!value.is_discarded(), ErrorKind::kUsage, "reward request: {} is no JSON: {}", what,
          shown(text));
  return value;
}

}  // namespace

RewardCommand::RewardCommand(RewardCommandOptions options) : options_(std::move(options)) {
  require(!options_.command.empty(), ErrorKind::kUsage, "reward command: is empty");
}

RewardCommand::~RewardCommand() = default;

std::string RewardCommand::ask(std::span<const RewardRequest> requests,
                               const Unanswered& unanswered) const {
  std::string lines;
  for (const auto& [id, i] : unanswered) {
    const auto& request = requests[i];
    const json question{{"id", id},
                        {"data_source", request.data_source},
                        {"solution_str", request.solution_str},
                        {"ground_truth", parsed(request.ground_truth, "ground_truth")},
                        {"extra_info", parsed(request.extra_info, "extra_info")}};
    lines += question.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
  }
  return lines;
}

std::string RewardCommand::converse(std::string_view questions,
                                    Unanswered& unanswered,
                                    std::vector<RewardScore>& scores) {
  using Clock = std::chrono::steady_clock;
  auto heard = Clock::now();
  while (!unanswered.empty()) {
    const auto limit = has_answered_ ? options_.timeout : options_.start_timeout;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(heard + limit - Clock::now());
    if (left.count() <= 0)
      return fmt::format("said nothing for {} s", static_cast<double>(limit.count()) / 1000);
    const auto line = process_->exchange(questions, left);
    if (!line) {
      if (process_->ended()) return fmt::format("ended ({})", *process_->ended());
      continue;
    }
    const auto answer = json::parse(*line, nullptr, /*allow_exceptions=*/false);
    refuse(!answer.is_object(), *line, "no JSON object");
    refuse(!answer.contains("id") || !answer["id"].is_number_integer(), *line, "no id");
    const auto asked = unanswered.find(answer["id"].get<std::int64_t>());
    refuse(asked == unanswered.end(), *line, "nothing of this id is to be answered");
    scores[asked->second] = score_of(answer, *line);
    unanswered.erase(asked);
    has_answered_ = true;
    heard = Clock::now();
  }
  return "";
}

std::vector<RewardScore> RewardCommand::compute_score(std::span<const RewardRequest> requests) {
  std::vector<RewardScore> scores(requests.size());
  Unanswered unanswered;
  for (std::size_t i = 0; i < requests.size(); ++i) unanswered[next_id_++] = i;
  try {
    for (int failures = 0; !unanswered.empty();) {
      const auto questions = ask(requests, unanswered);
      if (!process_) {
        process_ = std::make_unique<ChildProcess>(options_.command);
        has_answered_ = false;
      }
      const auto before = unanswered.size();
      const auto trouble = converse(questions, unanswered, scores);
      if (trouble.empty()) break;
      process_.reset();
      failures = unanswered.size() < before ? 1 : failures + 1;
      require(failures <= options_.max_restarts, ErrorKind::kIo,
              "it {}, {} times in a row, and left {} of {} answers unscored, the first of {}: {}",
              trouble, failures, unanswered.size(), requests.size(),
              requests[unanswered.begin()->second].data_source,
              shown(requests[unanswered.begin()->second].solution_str));
      ++num_restarts_;
    }
  } catch (Error& error) {
    process_.reset();
    error.add_context(fmt::format("asking the reward command {}", options_.command));
    throw;
  }
  return scores;
}

}  // namespace ferry::trainer
