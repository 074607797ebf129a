#include "trainer/rewards/rules/math_reward.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::trainer::math_reward {
namespace math_reward_test {

struct Case {
  std::string name{};
  std::string solution{};
  std::string truth{};
  double score = 0;
};

class MathReward : public testing::TestWithParam<Case> {};

// The scores are those of verl 0.9.1, utils/reward_score/math_reward.py.
TEST_P(MathReward, Scores) {
  const auto& [name, solution, truth, score] = GetParam();
  EXPECT_EQ(compute_score(solution, truth), score) << solution;
}

INSTANTIATE_TEST_SUITE_P(
    Answer,
    MathReward,
    testing::Values(Case{"FractionWithoutBraces", R"(\boxed{\frac12})", "\\frac{1}{2}", 1},
                    Case{"FractionWithASlash", R"(\boxed{1/2})", "\\frac{1}{2}", 1},
                    Case{"LongFractionWithASlash", R"(\boxed{12/34})", "\\frac{12}{34}", 1},
                    Case{"FractionWithALeadingZero", R"(\boxed{02/4})", "\\frac{2}{4}", 0},
                    Case{"HalfAsADecimal", R"(\boxed{0.5})", "1/2", 1},
                    Case{"DecimalWithoutItsZero", R"(\boxed{.5})", "0.5", 1},
                    Case{"SideOfAnEquation", R"(\boxed{k = 3})", "3", 1},
                    Case{"DisplayedFraction", R"(\boxed{\dfrac{3}{4}})", "\\tfrac{3}{4}", 1},
                    Case{"Unit", R"(\boxed{5\text{ cm}})", "5", 1},
                    Case{"RootWithoutBraces", R"(\boxed{\sqrt3})", "\\sqrt{3}", 1},
                    Case{"Degrees", R"(\boxed{90^\circ})", "90", 1},
                    Case{"PerCent", R"(\boxed{10\%})", "10", 1},
                    Case{"LeftAndRight", R"(\boxed{\left(1,2\right)})", "(1,2)", 1},
                    Case{"BoxWithoutBraces", R"($\boxed 4$)", "4", 1},
                    Case{"LastOfTwoBoxes", R"(\boxed{1} \boxed{2})", "2", 1},
                    Case{"FirstOfTwoBoxes", R"(\boxed{1} \boxed{2})", "1", 0},
                    Case{"FramedBox", R"(\fbox{2})", "2", 0},
                    Case{"NoBox", R"(5)", "5", 0},
                    Case{"BoxThatIsNotClosed", R"(\boxed{5)", "5", 0}),
    [](const auto& test) { return test.param.name; });

}  // namespace math_reward_test
}  // namespace ferry::trainer::math_reward
