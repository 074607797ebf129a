// The worth of an answer, by the rule of the data it comes from (verl utils/reward_score:
// default_compute_score), and by its form.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "rollout/text/regex/regex.h"

namespace ferry::trainer {

struct RewardScore {
  double score = 0;
  // Results of the rule beside the score: numbers are metrics, texts are logged with the sample.
  std::map<std::string, double> numbers{};
  std::map<std::string, std::string> texts{};
  bool operator==(const RewardScore&) const = default;
};

// The score by the rule of the data (docs/training/rewards.md lists them); a ground truth that is
// no text is JSON. Throws Error(kUsage) for data that no rule scores.
RewardScore default_compute_score(std::string_view data_source,
                                  std::string_view solution_str,
                                  std::string_view ground_truth);

// Finds what default_compute_score() would, out of a record alone. Throws Error(kUsage) for data
// that no rule scores, with what does as a hint; Error(kCorrupt) for a ground truth that the rule
// finds in no answer, such as a list or nothing.
void require_rule(std::string_view data_source, const nlohmann::ordered_json& ground_truth);

// True if the data are programs, which tests score (trainer/rewards/code_reward.h).
bool is_code(std::string_view data_source);

// True if the whole answer has a form: "<think>[\s\S]*?</think>\s*<answer>[\s\S]*?</answer>\s*".
// The syntax is that of rollout/text/regex/regex.h, where a point is anything but the end of a
// line.
class FormatReward {
 public:
  // Throws Error(kUsage).
  explicit FormatReward(std::string_view pattern, double score = 1);

  double compute_score(std::string_view solution_str) const;

 private:
  rollout::text::Regex pattern_;
  double score_;
};

}  // namespace ferry::trainer
