// The matcher beside Oniguruma's meaning of the same patterns; tests/interop/rollout/
// test_tokenizer.py asks the tokenizers package about the patterns of the families.
#include "rollout/text/regex/regex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "rollout/text/unicode/unicode.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace regex_test {

using support::fails;
using Words = std::vector<std::string>;

// All matches that are not empty, from left to right.
Words matches(std::string_view pattern, std::string_view text) {
  const Regex regex(pattern);
  Regex::Stack stack;
  Words found;
  for (std::size_t from = 0; from <= text.size();) {
    const auto match = regex.find(text, from, stack);
    if (!match) break;
    if (match->end > match->begin) {
      found.emplace_back(text.substr(match->begin, match->end - match->begin));
    }
    from = match->end > match->begin ? match->end : match->end + 1;
  }
  return found;
}

TEST(Regex, ALiteralMatchesItself) {
  EXPECT_EQ(matches("ab", "xabab"), (Words{"ab", "ab"}));
}

TEST(Regex, TheFirstAlternativeThatFitsWins) {
  EXPECT_EQ(matches("a|ab", "ab"), Words{"a"});
}

TEST(Regex, AnAlternativeIsTakenBackWhereTheRestFails) {
  EXPECT_EQ(matches("(?:a|ab)c", "abc"), Words{"abc"});
}

TEST(Regex, AGreedyRepetitionTakesAsMuchAsItCan) {
  EXPECT_EQ(matches("a+", "aaab"), Words{"aaa"});
}

TEST(Regex, AGreedyRepetitionGivesBack) {
  EXPECT_EQ(matches("a+ab", "aaab"), Words{"aaab"});
}

TEST(Regex, ALazyRepetitionTakesAsLittleAsItCan) {
  EXPECT_EQ(matches("a+?", "aaa"), (Words{"a", "a", "a"}));
  EXPECT_EQ(matches("x.*?y", "xayby"), Words{"xay"});
}

TEST(Regex, APossessiveRepetitionGivesNothingBack) {
  EXPECT_EQ(matches("a++a", "aaa"), Words{});
}

TEST(Regex, AnAtomicGroupKeepsItsFirstMatch) {
  EXPECT_EQ(matches("(?>a|ab)c", "abc"), Words{});
}

TEST(Regex, CountsBoundARepetition) {
  EXPECT_EQ(matches("a{2,3}", "aaaaa"), (Words{"aaa", "aa"}));
  EXPECT_EQ(matches("(?:ab){,2}c", "ababc"), Words{"ababc"});
}

TEST(Regex, ABraceThatIsNoCountIsACharacter) {
  EXPECT_EQ(matches("a{x}", "a{x}"), Words{"a{x}"});
}

TEST(Regex, LookAheadTakesNothing) {
  EXPECT_EQ(matches(R"(\s+(?!\S))", "a  b "), (Words{" ", " "}));
  EXPECT_EQ(matches(R"(\w(?=\d))", "ab1"), Words{"b"});
}

TEST(Regex, LineAnchorsMatchAtEveryLine) {
  EXPECT_EQ(matches("^.", "ab\ncd\n"), (Words{"a", "c"}));
  EXPECT_EQ(matches(".$", "ab\ncd"), (Words{"b", "d"}));
}

TEST(Regex, TextAnchorsMatchAtTheEndsOnly) {
  EXPECT_EQ(matches(R"(\A.)", "a\nb"), Words{"a"});
  EXPECT_EQ(matches(R"(.\z)", "a\nb"), Words{"b"});
}

TEST(Regex, ADotIsNoLineBreak) {
  EXPECT_EQ(matches(".+", "ab\ncd"), (Words{"ab", "cd"}));
}

TEST(Regex, ASetHoldsRangesAndEscapes) {
  EXPECT_EQ(matches(R"([a-c\d-]+)", "xb-2y"), Words{"b-2"});
}

TEST(Regex, ANegatedSetHoldsEverythingElse) {
  EXPECT_EQ(matches(R"([^\s\p{L}\p{N}]+)", "a, b!\u00E9"), (Words{",", "!"}));
}

TEST(Regex, SetsIntersect) {
  EXPECT_EQ(matches(R"([\p{L}&&[^a-y]]+)", "xyzZ\u00E9"), Words{"zZ\u00E9"});
}

TEST(Regex, PropertiesMayBeNegated) {
  EXPECT_EQ(matches(R"(\P{L}+|\p{^L}+)", "ab12c"), Words{"12"});
}

TEST(Regex, HexadecimalEscapesAreCharacters) {
  EXPECT_EQ(matches(R"(\x41|\u00e9|\x{1F600})", "A\u00E9\U0001F600"),
            (Words{"A", "\u00E9", "\U0001F600"}));
}

TEST(Regex, CaseIsIgnoredInsideItsGroupOnly) {
  EXPECT_EQ(matches("(?i:'s)t", "'St 'sT"), Words{"'St"});
}

TEST(Regex, IgnoringCaseIncludesTheSignsThatFoldToAscii) {
  EXPECT_EQ(matches("(?i:k|s)", "\u212A\u017F"), (Words{"\u212A", "\u017F"}));
}

TEST(Regex, TheSearchBeginsWhereItIsAskedTo) {
  const Regex regex("a");
  Regex::Stack stack;
  EXPECT_EQ(regex.find("aba", 1, stack)->begin, 2);
}

TEST(Regex, GivesUpWhereItWouldTakeForever) {
  const Regex regex("(?:a|aa)+b");
  Regex::Stack stack;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"takes more than 10000000 steps"},
                    [&] { regex.find(std::string(60, 'a'), 0, stack); }));
}

TEST(Regex, ALongTextNeedsNoDeepStack) {
  EXPECT_EQ(matches("(?:ab|a)+", std::string(200'000, 'a')).size(), 1);
}

struct Refusal {
  const char* pattern;
  const char* message;
};
class RegexRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(RegexRefuses, ByName) {
  const auto& [pattern, message] = GetParam();
  EXPECT_TRUE(fails(ErrorKind::kUsage, {pattern, message, "is not supported"},
                    [&, text = pattern] { Regex{text}; }));
}

INSTANTIATE_TEST_SUITE_P(Patterns,
                         RegexRefuses,
                         ::testing::Values(Refusal{"a(?<=b)", "a look-behind at byte 3"},
                                           Refusal{R"((a)\1)", "this escape at byte 4"},
                                           Refusal{"[[:alpha:]]", "a POSIX bracket"},
                                           Refusal{"(?i:\xC3\xA9)", "case folding beyond ASCII"},
                                           Refusal{"(?i:ss)", "the case folding of two letters"},
                                           Refusal{"(?:a*)*", "a repetition of what can be empty"},
                                           Refusal{"a{2}+", "a count with a +"},
                                           Refusal{"(a", "a group without its )"},
                                           Refusal{"[a", "a bracket without its ]"},
                                           Refusal{"[b-a]", "a range that falls"},
                                           Refusal{"a)", "a ) without its ("},
                                           Refusal{"*a", "a quantifier of nothing"},
                                           Refusal{R"(\p{Klingon})", "this property"},
                                           Refusal{"a{9999}", "so large a count"}));

TEST(Regex, RefusesDeepNesting) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"so deep a nesting"},
                    [] { Regex(std::string(60, '(') + std::string(60, ')')); }));
}

TEST(Regex, RefusesALongProgram) {
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"longer than"}, [] { Regex("(?:(?:ab{900}){900}){900}"); }));
}

// Requests may have such patterns: each character's set once had a table of all characters.
TEST(Regex, OfManySetsIsReadInAMoment) {
  std::string members;
  for (char32_t c = 0; c < 20000; ++c) append_utf8(0x4E00 + c, members);
  const auto begin = std::chrono::steady_clock::now();
  const Regex regex("[" + members + "]");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_LE(sizeof(CodePointSet), 128U);  // each character of a pattern is one
}

}  // namespace regex_test
}  // namespace ferry::rollout::text
