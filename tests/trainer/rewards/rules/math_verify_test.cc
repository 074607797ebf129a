#include "trainer/rewards/rules/math_verify.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trainer/rewards/rules/math_expression.h"

namespace ferry::trainer {
namespace math_verify_test {

double score(const std::string& answer, const std::string& truth) {
  return math_verify::compute_score("So \\boxed{" + answer + "}.", truth);
}

struct Pair {
  std::string answer{};
  std::string truth{};
  bool same = true;
};

TEST(MathVerify, ComparesByMeaning) {
  const std::vector<Pair> pairs{
      {"\\frac{2}{4}", "0.5"},     {"2\\sqrt{2}", "\\sqrt{8}"},
      {"x+x+1", "2x+1"},           {"0.333", "\\frac13", false},
      {"\\sqrt{x^2}", "x", false}, {"12345678901234567890", "12345678901234567891", false},
      {"1,234,567", "1234567.0"},  {"\\{1, 2\\}", "\\{2, 1\\}"},
      {"(1, 2)", "(2, 1)", false}, {"[1, 2]", "[1, 2)", false},
  };
  for (const auto& [answer, truth, same] : pairs)
    EXPECT_EQ(score(answer, truth), same ? 1 : 0) << answer << " and " << truth;
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
