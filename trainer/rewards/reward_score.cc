#include "trainer/rewards/reward_score.h"

#include <algorithm>
#include <iterator>

#include "distckpt/base/error.h"
#include "rollout/text/unicode/unicode.h"
#include "trainer/rewards/rules/geo3k.h"
#include "trainer/rewards/rules/gsm8k.h"
#include "trainer/rewards/rules/math_dapo.h"
#include "trainer/rewards/rules/math_reward.h"
#include "trainer/rewards/rules/math_verify.h"
#include "trainer/rewards/rules/search_r1.h"

namespace ferry::trainer {
namespace {

using nlohmann::ordered_json;

// The rule of data: its score of an answer, and what throws for a ground truth that it cannot use.
// Tests score data without a rule.
struct DataRule {
  std::string_view data_source{};  // where it ends with *, its beginning
  RewardScore (*score)(std::string_view solution_str, std::string_view ground_truth) = nullptr;
  void (*require)(std::string_view data_source, const ordered_json& ground_truth) = nullptr;
};

template <double (*kScore)(std::string_view, std::string_view)>
RewardScore score_of(std::string_view solution_str, std::string_view ground_truth) {
  return {.score = kScore(solution_str, ground_truth)};
}

double gsm8k_score(std::string_view solution_str, std::string_view ground_truth) {
  return gsm8k::compute_score(solution_str, ground_truth);
}

RewardScore dapo_score(std::string_view solution_str, std::string_view ground_truth) {
  const auto result = math_dapo::compute_score(solution_str, ground_truth);
  return {.score = result.score,
          .numbers = {{"acc", result.acc ? 1 : 0}},
          .texts = {{"pred", result.pred}}};
}

double search_score(std::string_view solution_str, std::string_view ground_truth) {
  return search_r1::compute_score(solution_str, search_r1::targets_of(std::string(ground_truth)));
}

void require_text(std::string_view data_source, const ordered_json& ground_truth) {
  require(!ground_truth.is_structured() && !ground_truth.is_null(), ErrorKind::kCorrupt,
          "reward_model.ground_truth: is a JSON {}, which the rule of {} finds in no answer",
          ground_truth.type_name(), data_source);
}

void require_targets(std::string_view, const ordered_json& ground_truth) {
  (void)search_r1::targets_of(ground_truth);
}

constexpr auto kMath = &score_of<math_reward::compute_score>;
constexpr auto kMathVerify = &score_of<math_verify::compute_score>;
constexpr auto kGeometry = &score_of<geo3k::compute_score>;
constexpr auto kGsm8k = &score_of<gsm8k_score>;
constexpr auto kSearch = &score_of<search_score>;

// verl's default_compute_score, and math_verify.
constexpr DataRule kRules[] = {
    {"openai/gsm8k", kGsm8k, require_text},
    {"lighteval/MATH", kMath, require_text},
    {"DigitalLearningGmbH/MATH-lighteval", kMath, require_text},
    {"HuggingFaceH4/MATH-500", kMath, require_text},
    {"math_dapo", dapo_score, require_text},
    {"math", dapo_score, require_text},
    {"math_dapo_reasoning", dapo_score, require_text},
    {"aime*", dapo_score, require_text},
    {"math_verify", kMathVerify, require_text},
    {"hiyouga/geometry3k", kGeometry, require_text},
    {"searchR1_nq", kSearch, require_targets},
    {"searchR1_triviaqa", kSearch, require_targets},
    {"searchR1_popqa", kSearch, require_targets},
    {"searchR1_hotpotqa", kSearch, require_targets},
    {"searchR1_2wikimultihopqa", kSearch, require_targets},
    {"searchR1_musique", kSearch, require_targets},
    {"searchR1_bamboogle", kSearch, require_targets},
    {"codecontests"},
    {"apps"},
    {"codeforces"},
    {"taco"},
};

// nullptr: nothing scores the data.
const DataRule* find_rule(std::string_view data_source) {
  const auto* const found = std::ranges::find_if(kRules, [&](const DataRule& rule) {
    const auto name = rule.data_source;
    return name.ends_with('*') ? data_source.starts_with(name.substr(0, name.size() - 1))
                               : data_source == name;
  });
  return found == std::end(kRules) ? nullptr : found;
}

// The advice for data without a rule.
std::string_view hint_for(std::string_view data_source, bool is_code) {
  if (is_code) return "reward_model.command=\"ferry score\" tests code (docs/training/rewards.md)";
  if (data_source.starts_with("numina_"))
    return "verl's own function can, as the program of reward_model.command "
           "(docs/training/rewards.md); or name the data math_verify, whose rule compares values";
  return "a program can: reward_model.command, or --reward-command (docs/training/rewards.md)";
}

const DataRule& rule_of(std::string_view data_source) {
  const auto* const rule = find_rule(data_source);
  if (rule != nullptr && rule->score != nullptr) return *rule;
  throw Error(ErrorKind::kUsage, fmt::format("reward: no rule scores data_source {}", data_source),
              std::string(hint_for(data_source, rule != nullptr)));
}

}  // namespace

RewardScore default_compute_score(std::string_view data_source,
                                  std::string_view solution_str,
                                  std::string_view ground_truth) {
  return rule_of(data_source).score(solution_str, ground_truth);
}

void require_rule(std::string_view data_source, const ordered_json& ground_truth) {
  rule_of(data_source).require(data_source, ground_truth);
}

bool is_code(std::string_view data_source) {
  const auto* const rule = find_rule(data_source);
  return rule != nullptr && rule->score == nullptr;
}

FormatReward::FormatReward(std::string_view pattern, double score)
    : pattern_(fmt::format("\\A(?:{})\\z", pattern)), score_(score) {}

double FormatReward::compute_score(std::string_view solution_str) const {
  rollout::text::Regex::Stack stack;
  const auto text = rollout::text::replace_invalid_utf8(solution_str);
  return pattern_.find(text, 0, stack) ? score_ : 0;
}

}  // namespace ferry::trainer
