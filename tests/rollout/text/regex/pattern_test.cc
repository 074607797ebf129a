#include "rollout/text/regex/pattern.h"

#include <gtest/gtest.h>

namespace ferry::rollout::text {
namespace pattern_test {

TEST(Pattern, ALiteralIsNoRegularExpression) {
  EXPECT_EQ(Pattern({false, "."}).replace("a.b", "-"), "a-b");
}

TEST(Pattern, MatchesOfALiteralDoNotOverlap) {
  EXPECT_EQ(Pattern({false, "aa"}).replace("aaaaa", "x"), "xxa");
}

TEST(Pattern, ReplacesEachMatchOfARegularExpression) {
  EXPECT_EQ(Pattern({true, R"(\s+)"}).replace(" a \n b", "_"), "_a_b");
}

TEST(Pattern, EmptyMatchesCountBetweenCharacters) {
  EXPECT_EQ(Pattern({true, "x*"}).replace("\u00E9x", "-"), "-\u00E9-");
}

TEST(Pattern, WithoutAMatchTheTextStays) {
  EXPECT_EQ(Pattern({true, "z"}).replace("abc", "-"), "abc");
}

}  // namespace pattern_test
}  // namespace ferry::rollout::text
