#include "trainer/rewards/rules/mathruler.h"

#include <gtest/gtest.h>

#include <string>

#include "trainer/rewards/rules/geo3k.h"
#include "trainer/rewards/rules/latex_text.h"

namespace ferry::trainer::mathruler {
namespace mathruler_test {

struct Graded {
  const char* name;
  const char* answer;
  const char* truth;
  bool right;
};

class Mathruler : public testing::TestWithParam<Graded> {};

TEST_P(Mathruler, Grades) {
  const auto& [name, answer, truth, right] = GetParam();
  EXPECT_EQ(grade_answer(code_points::decode(answer), code_points::decode(truth)), right);
}

INSTANTIATE_TEST_SUITE_P(
    Answer,
    Mathruler,
    testing::Values(Graded{"ValueOfARoot", R"(\frac{6}{\sqrt{3}})", R"(2 \sqrt { 3 })", true},
                    Graded{"MixedNumber", R"(1\frac{1}{2})", "1.5", true},
                    Graded{"FractionThatIsNotReduced", "2/4", "1/2", false},
                    Graded{"WholeNumberByItsValue", "6*6", "36", false},
                    Graded{"Units", R"(36\text{ cm}^2)", "36", true},
                    Graded{"Commas", "1,000", "1000", true},
                    Graded{"TupleOfValues", "(2x, 1)", "(x+x, 1)", true},
                    Graded{"Product", "(x-1)(x+1)", "x^2-1", true},
                    Graded{"OtherBrackets", "[1,2]", "(1,2)", false},
                    Graded{"DecimalForARoot", "3.4641016151377544", R"(2\sqrt{3})", false},
                    Graded{"MoreThanTwoLetters", "abc", "cba", false}),
    [](const auto& info) { return info.param.name; });

TEST(ExtractBoxedContent, IsThatOfTheLastBox) {
  EXPECT_EQ(extract_boxed_content(U"\\boxed{1} \\boxed{ {2} }"), U"{2}");
  EXPECT_EQ(extract_boxed_content(U"\\boxed{1} \\boxed{2"), U"None");
}

TEST(LatexText, KeepsWhatPeopleRead) {
  EXPECT_EQ(latex::to_text(U"\\frac{\\sqrt[3]{5}}{2}\\cdot \\foo{x}"), U"√(5)/2·x");
  EXPECT_EQ(latex::to_text(U"\\frac12 \\sqrt"), std::nullopt);
}

TEST(Geo3k, AddsATenthForTheForm) {
  EXPECT_DOUBLE_EQ(geo3k::compute_score("<think>a\nb</think> \\boxed{3}.", "3"), 1);
  EXPECT_DOUBLE_EQ(geo3k::compute_score("<think>a\nb</think> \\boxed{4}.", "3"), 0.1);
  EXPECT_DOUBLE_EQ(geo3k::compute_score("\\boxed{3}", "3"), 0.9);
  EXPECT_DOUBLE_EQ(geo3k::compute_score("\\boxed{3} <think></think>", "4"), 0);
}

}  // namespace mathruler_test
}  // namespace ferry::trainer::mathruler
