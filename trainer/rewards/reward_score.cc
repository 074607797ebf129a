#include "trainer/rewards/reward_score.h"

#include <algorithm>
#include <array>

#include "distckpt/base/error.h"
#include "rollout/text/unicode/unicode.h"
#include "trainer/rewards/gsm8k.h"
#include "trainer/rewards/math_dapo.h"
#include "trainer/rewards/math_reward.h"
#include "trainer/rewards/math_verify.h"

namespace ferry::trainer {
namespace {

constexpr std::array<std::string_view, 3> kMath{
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"};
constexpr std::array<std::string_view, 3> kMathDapo{"math_dapo", "math", "math_dapo_reasoning"};

}  // namespace

RewardScore default_compute_score(std::string_view data_source,
                                  std::string_view solution_str,
                                  std::string_view ground_truth) {
  const auto is_one_of = [&](const auto& names) {
    return std::ranges::find(names, data_source) != names.end();
  };
  if (data_source == "openai/gsm8k")
    return {.score = gsm8k::compute_score(solution_str, ground_truth)};
  if (is_one_of(kMath)) return {.score = math_reward::compute_score(solution_str, ground_truth)};
  if (data_source == "math_verify")
    return {.score = math_verify::compute_score(solution_str, ground_truth)};
  if (is_one_of(kMathDapo) || data_source.starts_with("aime")) {
    const auto result = math_dapo::compute_score(solution_str, ground_truth);
    return {.score = result.score,
            .numbers = {{"acc", result.acc ? 1 : 0}},
            .texts = {{"pred", result.pred}}};
  }
  throw Error(ErrorKind::kUsage, fmt::format("reward: no rule scores data_source {}", data_source),
              "a program can: --reward-command");
}

FormatReward::FormatReward(std::string_view pattern, double score)
    : pattern_(fmt::format("\\A(?:{})\\z", pattern)), score_(score) {}

double FormatReward::compute_score(std::string_view solution_str) const {
  rollout::text::Regex::Stack stack;
  const auto text = rollout::text::replace_invalid_utf8(solution_str);
  return pattern_.find(text, 0, stack) ? score_ : 0;
}

}  // namespace ferry::trainer
