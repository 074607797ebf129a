#include "trainer/rewards/reward_score.h"

#include <algorithm>
#include <array>

#include "distckpt/base/error.h"
#include "rollout/text/unicode/unicode.h"
#include "trainer/rewards/code_reward.h"
#include "trainer/rewards/gsm8k.h"
#include "trainer/rewards/math_dapo.h"
#include "trainer/rewards/math_reward.h"
#include "trainer/rewards/math_verify.h"

namespace ferry::trainer {
namespace {

constexpr std::array<std::string_view, 3> kMath{
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"};
constexpr std::array<std::string_view, 3> kMathDapo{"math_dapo", "math", "math_dapo_reasoning"};

bool is_one_of(const auto& names, std::string_view data_source) {
  return std::ranges::find(names, data_source) != names.end();
}

bool is_math_dapo(std::string_view data_source) {
  return is_one_of(kMathDapo, data_source) || data_source.starts_with("aime");
}

[[noreturn]] void refuse(std::string_view data_source) {
  throw Error(ErrorKind::kUsage, fmt::format("reward: no rule scores data_source {}", data_source),
              is_code(data_source)
                  ? "reward_model.command=\"ferry score\" tests code (docs/training/rewards.md)"
                  : "a program can: reward_model.command, or --reward-command "
                    "(docs/training/rewards.md)");
}

}  // namespace

RewardScore default_compute_score(std::string_view data_source,
                                  std::string_view solution_str,
                                  std::string_view ground_truth) {
  if (data_source == "openai/gsm8k")
    return {.score = gsm8k::compute_score(solution_str, ground_truth)};
  if (is_one_of(kMath, data_source))
    return {.score = math_reward::compute_score(solution_str, ground_truth)};
  if (data_source == "math_verify")
    return {.score = math_verify::compute_score(solution_str, ground_truth)};
  if (is_math_dapo(data_source)) {
    const auto result = math_dapo::compute_score(solution_str, ground_truth);
    return {.score = result.score,
            .numbers = {{"acc", result.acc ? 1 : 0}},
            .texts = {{"pred", result.pred}}};
  }
  refuse(data_source);
}

void require_rule(std::string_view data_source, const nlohmann::ordered_json& ground_truth) {
  const bool has_rule = data_source == "openai/gsm8k" || data_source == "math_verify" ||
                        is_one_of(kMath, data_source) || is_math_dapo(data_source);
  if (!has_rule) refuse(data_source);
  require(!ground_truth.is_structured() && !ground_truth.is_null(), ErrorKind::kCorrupt,
          "reward_model.ground_truth: is a JSON {}, which the rule of {} finds in no answer",
          ground_truth.type_name(), data_source);
}

FormatReward::FormatReward(std::string_view pattern, double score)
    : pattern_(fmt::format("\\A(?:{})\\z", pattern)), score_(score) {}

double FormatReward::compute_score(std::string_view solution_str) const {
  rollout::text::Regex::Stack stack;
  const auto text = rollout::text::replace_invalid_utf8(solution_str);
  return pattern_.find(text, 0, stack) ? score_ : 0;
}

}  // namespace ferry::trainer
