#include "trainer/rewards/rules/math_answer.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::trainer {
namespace math_answer_test {

using math_verify::answer_of;

std::string found(const std::string& text) {
  return answer_of(text).value_or("none");
}

TEST(MathAnswer, IsTheLastBoxOrAListOfBoxes) {
  EXPECT_EQ(found("\\boxed{1}, no: \\boxed{\\frac{2}{4}} $5$"), "\\frac{2}{4}");
  EXPECT_EQ(found("$\\boxed{1}$, $\\boxed{2}$ and \\(\\boxed{3}\\)"), "1,2,3");
  EXPECT_EQ(found("\\boxed{1"), "none");
}

TEST(MathAnswer, StandsBehindTheWordInAnyCaseAndStyle) {
  for (const std::string text : {"**Answer:** 42", "The ANSWER is **42**.", "answer: $42$ cm",
                                 "### Answer\n\n\\[42\\]", "The answer to all is 42, as said"})
    EXPECT_EQ(found(text), "42") << text;
  EXPECT_EQ(found("Answer: 2x+1"), "2x+1");
  EXPECT_EQ(found("The answer is (B)."), "(B)");
  EXPECT_EQ(found("Answer: New York"), "New York");
  EXPECT_EQ(found("The answer is nothing that one could find here"), "none");
}

TEST(MathAnswer, IsElseTheLastFormulaOrNumber) {
  EXPECT_EQ(found("As $x=1$ or $x=2$."), "x=1,x=2");
  EXPECT_EQ(found("As $x=1$, we get 3*(4-1)"), "3*(4-1)");
  EXPECT_EQ(found("It costs $1,234.50, that is 5%"), "5%");
  EXPECT_EQ(found("1 234 567 people"), "1234567");
  EXPECT_EQ(found("-\\frac{1}{2} of it"), "-\\frac{1}{2}");
  EXPECT_EQ(found("x7 and y8"), "none");
}

TEST(MathAnswer, IsNotReadPastAThousandCharacters) {
  EXPECT_EQ(found("$" + std::string(1100, 'x') + "$"), "none");
}

}  // namespace math_answer_test
}  // namespace ferry::trainer
