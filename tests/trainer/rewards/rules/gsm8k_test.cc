#include "trainer/rewards/rules/gsm8k.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::trainer::gsm8k {
namespace gsm8k_test {

struct Case {
  std::string name{};
  std::string solution{};
  std::string truth{};
  double score = 0;
};

class Gsm8k : public testing::TestWithParam<Case> {};

// The scores are those of verl 0.9.1, utils/reward_score/gsm8k.py.
TEST_P(Gsm8k, Scores) {
  const auto& [name, solution, truth, score] = GetParam();
  EXPECT_EQ(compute_score(solution, truth), score) << solution;
}

INSTANTIATE_TEST_SUITE_P(Answer,
                         Gsm8k,
                         testing::Values(Case{"BehindTheMark", "#### 72", "72", 1},
                                         Case{"WithoutItsCommas", "#### 1,234", "1234", 1},
                                         Case{"BehindTheLastMark", "#### 5 then #### 6", "6", 1},
                                         Case{"NegativeWithAPoint", "#### -3.5", "-3.5", 1},
                                         Case{"WithoutAMark", "72", "72", 0},
                                         Case{"NoNumber", "#### seventy", "70", 0},
                                         Case{"MoreThan300CharactersBeforeTheEnd",
                                              "#### 7\n" + std::string(300, 'x'), "7", 0},
                                         Case{"WithAPointBehindIt", "#### 72.", "72", 0}),
                         [](const auto& test) { return test.param.name; });

TEST(Gsm8kMethod, FlexibleTakesTheLastNumber) {
  EXPECT_EQ(compute_score("so 3 and 4", "4", {.method = Method::kFlexible}), 1);
}

TEST(Gsm8kMethod, FlexibleSkipsALonePoint) {
  EXPECT_EQ(compute_score("the end: 4 .", "4", {.method = Method::kFlexible}), 1);
}

TEST(Gsm8kMethod, FlexibleKeepsCommas) {
  EXPECT_EQ(compute_score("#### 1,234", "1234", {.method = Method::kFlexible}), 0);
}

TEST(Gsm8kScore, FormatScoreIsForAWrongNumber) {
  EXPECT_EQ(compute_score("#### 72.", "72", {.format_score = 0.25}), 0.25);
}

TEST(Gsm8kScore, FormatScoreIsNotForNoNumber) {
  EXPECT_EQ(compute_score("no number", "72", {.format_score = 0.25}), 0);
}

}  // namespace gsm8k_test
}  // namespace ferry::trainer::gsm8k
