#include "trainer/rewards/rules/math_dapo.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::trainer::math_dapo {
namespace math_dapo_test {

struct Case {
  std::string name{};
  std::string solution{};
  std::string truth{};
  double score = 0;
};

class MathDapo : public testing::TestWithParam<Case> {};

// The scores are those of verl 0.9.1, utils/reward_score/math_dapo.py.
TEST_P(MathDapo, Scores) {
  const auto& [name, solution, truth, score] = GetParam();
  EXPECT_EQ(compute_score(solution, truth).score, score) << solution;
}

INSTANTIATE_TEST_SUITE_P(
    Answer,
    MathDapo,
    testing::Values(Case{"BehindAnswer", "Answer: 7", "7", 1},
                    Case{"AnotherNumber", "Answer: 7", "8", -1},
                    Case{"OnTheNextLineInCapitals", "ANSWER :\n 1,000", "1000", 1},
                    Case{"LastOfTwoAnswers", "Answer: 1\nAnswer: 2", "2", 1},
                    Case{"SideOfAnEquationInDollars", "Answer: $x = 5$", "5", 1},
                    Case{"TextCommand", R"(Answer: \text{even})", "even", 1},
                    Case{"FractionWithoutBraces", R"(Answer: \frac12)", "\\frac{1}{2}", 1},
                    Case{"RootWithoutBraces", R"(Answer: \sqrt2)", "\\sqrt{2}", 1},
                    Case{"Unit", "Answer: 5 dollars", "5", 1},
                    Case{"Article", "Answer: an 8", "8", 1},
                    Case{"Degrees", R"(Answer: 90^\circ)", "90", 1},
                    Case{"BoxInsteadOfAnswer", R"(so \boxed{9})", "9", 1},
                    Case{"AnotherBox", R"(so \boxed{9})", "8", -1},
                    Case{"BoxMoreThan100CharactersBeforeTheEnd",
                         R"(\boxed{3})" + std::string(100, 'y'), "3", -1},
                    Case{"Nothing", "nothing", "7", -1},
                    Case{"MoreThan300CharactersBeforeTheEnd", "Answer: 7\n" + std::string(300, 'x'),
                         "7", -1}),
    [](const auto& test) { return test.param.name; });

TEST(MathDapoPrediction, IsNormalised) {
  EXPECT_EQ(compute_score("Answer: 1,000 dollars", "7").pred, "1000");
}

TEST(MathDapoPrediction, IsInvalidWithoutAnAnswer) {
  EXPECT_EQ(compute_score("nothing", "7").pred, "[INVALID]");
}

TEST(MathDapoPrediction, IsAccurateWhereTheScoreIsPositive) {
  EXPECT_TRUE(compute_score("Answer: 7", "7").acc);
  EXPECT_FALSE(compute_score("Answer: 7", "8").acc);
}

}  // namespace math_dapo_test
}  // namespace ferry::trainer::math_dapo
