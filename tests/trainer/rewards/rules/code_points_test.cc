#include "trainer/rewards/rules/code_points.h"

#include <gtest/gtest.h>

#include <vector>

// The values are those of Python's str.
namespace ferry::trainer::code_points {
namespace code_points_test {

TEST(CodePoints, GoThereAndBack) {
  EXPECT_EQ(encode(decode("a\u00e9\u65e5\U0001d7d9")), "a\u00e9\u65e5\U0001d7d9");
}

TEST(CodePoints, ReplaceWhatIsNoUtf8) {
  EXPECT_EQ(decode("a\xff"), U"a\ufffd");
}

TEST(Replace, DoesNotReadWhatItWrote) {
  EXPECT_EQ(replace(U"aaa", U"a", U"aa"), U"aaaaaa");
}

TEST(Replace, TakesTheFirstOfTwoThatOverlap) {
  EXPECT_EQ(replace(U"aaa", U"aa", U"b"), U"ba");
}

TEST(Split, KeepsEmptyParts) {
  EXPECT_EQ(split(U",a,,b", U","), (std::vector<View>{U"", U"a", U"", U"b"}));
}

TEST(Split, OfNothingIsOnePart) {
  EXPECT_EQ(split(U"", U","), std::vector<View>{U""});
}

TEST(Strip, TakesSpaceOfAllScripts) {
  EXPECT_EQ(strip(U"\u3000\t a b\u2009\n"), U"a b");
}

TEST(Strip, LeavesAZeroWidthSpace) {
  EXPECT_EQ(strip(U"\u200b"), U"\u200b");
}

TEST(Last, IsAllOfAShortText) {
  EXPECT_EQ(last(U"ab", 3), U"ab");
}

TEST(Last, CountsCharactersNotBytes) {
  EXPECT_EQ(last(U"\u65e5\u672c\u8a9e", 2), U"\u672c\u8a9e");
}

TEST(IsDigit, KnowsDecimalDigitsOfAllScripts) {
  EXPECT_TRUE(is_digit(U'7'));
  EXPECT_TRUE(is_digit(U'\u0667'));      // Arabic-Indic seven
  EXPECT_TRUE(is_digit(U'\U0001d7d9'));  // double-struck one
}

TEST(IsDigit, KnowsSuperscriptsAndCircles) {
  EXPECT_TRUE(is_digit(U'\u00b2'));
  EXPECT_TRUE(is_digit(U'\u2460'));
}

TEST(IsDigit, IsNotForFractionsOrRomanNumbers) {
  EXPECT_FALSE(is_digit(U'\u00bd'));
  EXPECT_FALSE(is_digit(U'\u2167'));
}

TEST(BalancedBraces, EndAtTheBraceThatClosesTheFirst) {
  EXPECT_EQ(balanced_braces(U"x\\boxed{a{b}c}d}", 1), U"\\boxed{a{b}c}");
}

TEST(BalancedBraces, AreEmptyWithoutAClosingBrace) {
  EXPECT_TRUE(balanced_braces(U"\\boxed{a{b}", 0).empty());
}

}  // namespace code_points_test
}  // namespace ferry::trainer::code_points
