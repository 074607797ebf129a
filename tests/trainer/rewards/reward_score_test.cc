#include "trainer/rewards/reward_score.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace reward_score_test {

TEST(DefaultComputeScore, ReadsGsm8kByItsMark) {
  EXPECT_EQ(default_compute_score("openai/gsm8k", "#### 72", "72"), RewardScore{.score = 1});
}

class MathSource : public testing::TestWithParam<const char*> {};

TEST_P(MathSource, IsReadByItsBox) {
  EXPECT_EQ(default_compute_score(GetParam(), R"(\boxed{1/2})", R"(\frac{1}{2})"),
            RewardScore{.score = 1});
}

INSTANTIATE_TEST_SUITE_P(Of,
                         MathSource,
                         testing::Values("lighteval/MATH",
                                         "DigitalLearningGmbH/MATH-lighteval",
                                         "HuggingFaceH4/MATH-500"));

class DapoSource : public testing::TestWithParam<const char*> {};

TEST_P(DapoSource, SaysAccuracyAndPredictionToo) {
  EXPECT_EQ(default_compute_score(GetParam(), "Answer: 7", "8"),
            (RewardScore{.score = -1, .numbers = {{"acc", 0}}, .texts = {{"pred", "7"}}}));
}

INSTANTIATE_TEST_SUITE_P(Of,
                         DapoSource,
                         testing::Values("math_dapo", "math", "math_dapo_reasoning", "aime2024"));

TEST(DefaultComputeScore, SendsOtherDataToAProgram) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage,
                             {"no rule scores data_source poems", "--reward-command"},
                             [] { default_compute_score("poems", "a", "b"); }));
}

TEST(RequireRule, RefusesARecordThatNoAnswerCouldMatch) {
  using support::fails;
  EXPECT_NO_THROW(require_rule("openai/gsm8k", "72"));
  EXPECT_NO_THROW(require_rule("aime2024", 72));
  for (const char* truth : {"[\"1\", \"2\"]", "{\"target\": \"a\"}", "null"})
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"ground_truth: is a JSON ", "openai/gsm8k"}, [&] {
      require_rule("openai/gsm8k", nlohmann::ordered_json::parse(truth));
    })) << truth;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"data_source poems", "reward_model.command"},
                    [] { require_rule("poems", "a"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"data_source apps", "ferry score"},
                    [] { require_rule("apps", "{}"); }));
}

TEST(DefaultComputeScore, FindsSearchedAnswersAmongTargets) {
  for (const char* source :
       {"searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"})
    EXPECT_EQ(
        default_compute_score(source, "<answer>The Nile</answer>", R"({"target": ["x", "nile"]})"),
        RewardScore{.score = 1})
        << source;
}

TEST(RequireRule, WantsTargetsOfSearchedAnswers) {
  const auto parsed = [](const char* text) { return nlohmann::ordered_json::parse(text); };
  for (const char* truth : {R"({"target": "a"})", R"({"target": ["a", "b"]})", R"({"target": []})"})
    EXPECT_NO_THROW(require_rule("searchR1_nq", parsed(truth))) << truth;
  for (const char* truth : {R"("a")", R"({"target": 3})", R"({"target": [3]})", "[\"a\"]", "null"})
    EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"ground_truth: names no answers"}, [&] {
      require_rule("searchR1_nq", parsed(truth));
    })) << truth;
}

TEST(IsCode, KnowsItsDataSets) {
  EXPECT_TRUE(is_code("codecontests"));
  EXPECT_TRUE(is_code("taco"));
  EXPECT_FALSE(is_code("openai/gsm8k"));
}

TEST(FormatReward, IsForAnAnswerOfTheForm) {
  EXPECT_EQ(FormatReward("<a>[0-9]+</a>", 0.25).compute_score("<a>12</a>"), 0.25);
}

TEST(FormatReward, WantsTheWholeAnswer) {
  EXPECT_EQ(FormatReward("<a>[0-9]+</a>").compute_score("so <a>12</a>"), 0);
}

TEST(FormatReward, TakesAnyAlternativeWhole) {
  EXPECT_EQ(FormatReward("yes|no").compute_score("no"), 1);
  EXPECT_EQ(FormatReward("yes|no").compute_score("nobody"), 0);
}

TEST(FormatReward, EndsAPointAtTheLine) {
  EXPECT_EQ(FormatReward("a.*z").compute_score("a\nz"), 0);
}

TEST(FormatReward, RefusesAPatternThatIsNone) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {}, [] { FormatReward("(").compute_score(""); }));
}

}  // namespace reward_score_test
}  // namespace ferry::trainer
