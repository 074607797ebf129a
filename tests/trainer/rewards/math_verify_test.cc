#include "trainer/rewards/math_verify.h"

#include <gtest/gtest.h>

#include <string>

#include "trainer/rewards/math_expression.h"

namespace ferry::trainer {
namespace math_verify_test {

double score(const std::string& answer, const std::string& truth) {
  return math_verify::compute_score("So \\boxed{" + answer + "}.", truth);
}

TEST(MathVerify, ComparesValues) {
  EXPECT_EQ(score("\\frac{2}{4}", "0.5"), 1);
  EXPECT_EQ(score("2\\sqrt{2}", "\\sqrt{8}"), 1);
  EXPECT_EQ(score("x+x+1", "2x+1"), 1);
  EXPECT_EQ(score("0.333", "\\frac13"), 0);
  EXPECT_EQ(score("\\sqrt{x^2}", "x"), 0);
}

TEST(MathVerify, TellsLongNumbersApart) {
  EXPECT_EQ(score("12345678901234567890", "12345678901234567891"), 0);
  EXPECT_EQ(score("1,234,567", "1234567.0"), 1);
}

TEST(MathVerify, SetsHaveNoOrderAndTuplesHave) {
  EXPECT_EQ(score("\\{1, 2\\}", "\\{2, 1\\}"), 1);
  EXPECT_EQ(score("(1, 2)", "(2, 1)"), 0);
  EXPECT_EQ(score("[1, 2]", "[1, 2)"), 0);
}

TEST(MathVerify, WordsAreNoProducts) {
  EXPECT_EQ(score("listen", "silent"), 0);
  EXPECT_EQ(score("ab", "ba"), 1);
}

TEST(MathVerify, TextThatIsNestedDeeplyIsNoAnswer) {
  EXPECT_EQ(score(std::string(400, '(') + "1" + std::string(400, ')'), "1"), 0);
  EXPECT_EQ(score(std::string(2000, '1'), std::string(2000, '1')), 0);
}

TEST(MathExpression, HasNoValueWhereItIsInfiniteOrIsNone) {
  EXPECT_FALSE(math_value("1/0", 0));
  EXPECT_FALSE(math_value("1+", 0));
  EXPECT_EQ(math_value("1\\frac{1}{2}", 0), MathValue(1.5));
}

}  // namespace math_verify_test
}  // namespace ferry::trainer
