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

// openai/gsm8k; lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500;
// math_dapo, math, math_dapo_reasoning, aime*; math_verify. Throws Error(kUsage) for other data.
RewardScore default_compute_score(std::string_view data_source,
                                  std::string_view solution_str,
                                  std::string_view ground_truth);

// Finds what default_compute_score() would, out of a record alone. Throws Error(kUsage) for data
// that no rule scores, with what does as a hint; Error(kCorrupt) for a ground truth in JSON that no
// answer could be: a list, an object, nothing.
void require_rule(std::string_view data_source, const nlohmann::ordered_json& ground_truth);

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
