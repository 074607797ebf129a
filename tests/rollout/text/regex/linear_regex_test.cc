#include "rollout/text/regex/linear_regex.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace linear_regex_test {

using support::fails;

bool matches(std::string_view pattern, std::string_view text) {
  return LinearRegex(pattern).matches(text);
}

bool is_refused(std::string_view pattern, std::string_view why) {
  return fails(ErrorKind::kUsage, {why}, [&] { LinearRegex regex(pattern); });
}

TEST(LinearRegex, AsksForAllOfTheText) {
  EXPECT_TRUE(matches("abc", "abc"));
  EXPECT_FALSE(matches("abc", "abcd"));
  EXPECT_FALSE(matches("abc", "ab"));
  EXPECT_FALSE(matches("abc", "xabc"));
}

TEST(LinearRegex, TakesAnyOfItsChoices) {
  for (const auto* text : {"a", "bc", ""}) EXPECT_TRUE(matches("a|bc|", text)) << text;
  EXPECT_FALSE(matches("a|bc|", "b"));
}

TEST(LinearRegex, CountsRepetitions) {
  EXPECT_FALSE(matches("(ab){2,3}", "ab"));
  EXPECT_TRUE(matches("(ab){2,3}", "abab"));
  EXPECT_TRUE(matches("(ab){2,3}?", "ababab"));
  EXPECT_FALSE(matches("(ab){2,3}", "abababab"));
  EXPECT_TRUE(matches("(ab){2,}", "abababab"));
  EXPECT_FALSE(matches("a{3}", "aa"));
}

TEST(LinearRegex, RepeatsWithoutEnd) {
  EXPECT_TRUE(matches("a*b+c?", "b"));
  EXPECT_TRUE(matches("a*b+c?", "aaabbc"));
  EXPECT_FALSE(matches("a*b+c?", "aaa"));
}

TEST(LinearRegex, AnchorsAreTheEndsOfTheText) {
  EXPECT_TRUE(matches("^a$", "a"));
  EXPECT_FALSE(matches("^a$\nb", "a\nb"));
  EXPECT_FALSE(matches("a^b", "ab"));
}

TEST(LinearRegex, APointIsNoEndOfALine) {
  EXPECT_TRUE(matches(".", "\xC3\xA9"));
  EXPECT_FALSE(matches(".", "\n"));
}

TEST(LinearRegex, LooksAhead) {
  EXPECT_TRUE(matches("(?!.*visual).*proj", "model.q_proj"));
  EXPECT_FALSE(matches("(?!.*visual).*proj", "model.visual.q_proj"));
  EXPECT_TRUE(matches("(?=a)[ab]+", "ab"));
  EXPECT_FALSE(matches("(?=a)[ab]+", "ba"));
}

TEST(LinearRegex, MatchesNoTextThatIsNotUtf8) {
  EXPECT_FALSE(matches(".*", "a\xFF"));
}

// Going back for each way to divide the text takes longer than the universe is old.
TEST(LinearRegex, TakesTimeLinearInTheText) {
  EXPECT_FALSE(matches("(([a-z._0-9]+)+)+x", std::string(100'000, 'a')));
  EXPECT_TRUE(matches("(([a-z._0-9]+)+)+x", std::string(100'000, 'a') + "x"));
}

TEST(LinearRegex, RefusesWhatTakesMemoryOutOfProportion) {
  EXPECT_TRUE(is_refused("((a?){99}){99}", "repetitions spelled out"));
  EXPECT_TRUE(is_refused(std::string(2001, 'a'), "more than 2000 characters"));
}

TEST(LinearRegex, RepeatsNothingInNoTime) {
  EXPECT_TRUE(LinearRegex("((((){1000}){1000}){1000}){1000}").matches(""));
  const LinearRegex some("((((a{0}){1000}){1000}){5,1000})b");
  EXPECT_TRUE(some.matches("b"));
  EXPECT_FALSE(some.matches("ab"));
}

TEST(LinearRegex, RefusesWhatItDoesNotKnow) {
  EXPECT_TRUE(is_refused("(?>a)b", "an atomic group"));
  EXPECT_TRUE(is_refused("a++", "a possessive repetition"));
  EXPECT_TRUE(is_refused("(?=a(?!b))", "look-ahead inside look-ahead"));
  EXPECT_TRUE(is_refused("(a)\\1", "this escape"));
}

}  // namespace linear_regex_test
}  // namespace ferry::rollout::text
