#include "rollout/text/tokenizer/pre_tokenizer.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace pre_tokenizer_test {

using nlohmann::json;
using Words = std::vector<std::string>;

Words pieces(const json& settings, std::string_view text, bool starts_input = true) {
  Pieces found;
  PreTokenizer(settings, "pre_tokenizer").split(text, starts_input, found);
  Words words;
  for (const auto& piece : found.pieces) words.emplace_back(found[piece]);
  return words;
}
Words pieces(const char* settings, std::string_view text, bool starts_input = true) {
  return pieces(json::parse(settings), text, starts_input);
}
Words split_at_dashes(const char* behavior, bool invert, std::string_view text) {
  return pieces(json{{"type", "Split"},
                     {"pattern", {{"String", "-"}}},
                     {"behavior", behavior},
                     {"invert", invert}},
                text);
}

TEST(PreTokenizer, NullLeavesTheTextWhole) {
  EXPECT_EQ(pieces(json(), "a b"), Words{"a b"});
}

TEST(PreTokenizer, AnEmptyTextHasNoPieces) {
  EXPECT_EQ(pieces(json(), ""), Words{});
}

TEST(PreTokenizer, MatchesMayBeRemoved) {
  EXPECT_EQ(split_at_dashes("Removed", false, "a--b-"), (Words{"a", "b"}));
}

TEST(PreTokenizer, MatchesMayBePieces) {
  EXPECT_EQ(split_at_dashes("Isolated", false, "a--b"), (Words{"a", "-", "-", "b"}));
}

TEST(PreTokenizer, MatchesMayJoinThePieceBefore) {
  EXPECT_EQ(split_at_dashes("MergedWithPrevious", false, "a--b"), (Words{"a-", "-", "b"}));
}

TEST(PreTokenizer, MatchesMayJoinThePieceBehind) {
  EXPECT_EQ(split_at_dashes("MergedWithNext", false, "a--b"), (Words{"a", "-", "-b"}));
}

TEST(PreTokenizer, MatchesMayJoinOneAnother) {
  EXPECT_EQ(split_at_dashes("Contiguous", false, "a--b"), (Words{"a", "--", "b"}));
}

TEST(PreTokenizer, AnInvertedSplitTreatsTheOthersAsMatches) {
  EXPECT_EQ(split_at_dashes("Removed", true, "a--b"), (Words{"-", "-"}));
}

TEST(PreTokenizer, ByteLevelCutsLikeGpt2) {
  EXPECT_EQ(pieces(R"({"type": "ByteLevel", "add_prefix_space": false})", "I'll go  12!\n"),
            (Words{"I", "'ll", " go", " ", " 12", "!", "\n"}));
}

TEST(PreTokenizer, ByteLevelMayAddASpace) {
  EXPECT_EQ(pieces(R"({"type": "ByteLevel", "add_prefix_space": true})", "a"), Words{" a"});
}

TEST(PreTokenizer, ByteLevelMayLeaveTheTextWhole) {
  EXPECT_EQ(
      pieces(R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})", "a b"),
      Words{"a b"});
}

TEST(PreTokenizer, DigitsStandTogetherOrAlone) {
  EXPECT_EQ(pieces(R"({"type": "Digits"})", "a12b"), (Words{"a", "12", "b"}));
  EXPECT_EQ(pieces(R"({"type": "Digits", "individual_digits": true})", "a12"),
            (Words{"a", "1", "2"}));
}

TEST(PreTokenizer, PunctuationIsOfUnicodeAndAscii) {
  EXPECT_EQ(pieces(R"({"type": "Punctuation"})", "a$\u3002b"), (Words{"a", "$", "\u3002", "b"}));
}

TEST(PreTokenizer, WhitespaceKeepsWordsAndSigns) {
  EXPECT_EQ(pieces(R"({"type": "Whitespace"})", "ab_1 -- c!"), (Words{"ab_1", "--", "c", "!"}));
}

TEST(PreTokenizer, WhitespaceSplitDropsWhiteSpaceOnly) {
  EXPECT_EQ(pieces(R"({"type": "WhitespaceSplit"})", " a-b\u3000c "), (Words{"a-b", "c"}));
}

TEST(PreTokenizer, MetaspaceMarksWordsBehindTheirSpace) {
  EXPECT_EQ(
      pieces(R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"})", "a b"),
      (Words{"_a", "_b"}));
}

TEST(PreTokenizer, MetaspaceMayMarkTheBeginningOfTheInputOnly) {
  constexpr auto kFirst = R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"})";
  EXPECT_EQ(pieces(kFirst, "a"), Words{"_a"});
  EXPECT_EQ(pieces(kFirst, "a", /*starts_input=*/false), Words{"a"});
}

TEST(PreTokenizer, ASequenceCutsThePiecesAgain) {
  EXPECT_EQ(pieces(R"({"type": "Sequence", "pretokenizers": [
      {"type": "WhitespaceSplit"}, {"type": "Digits"}]})",
                   "a1 b"),
            (Words{"a", "1", "b"}));
}

TEST(PreTokenizer, NothingComesBehindByteLevel) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"a pre-tokenizer behind ByteLevel"}, [] {
    pieces(R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
           "");
  }));
}

TEST(PreTokenizer, AnUnknownBehaviorIsRefused) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"the behavior Shuffled is not supported"},
                             [] { split_at_dashes("Shuffled", false, ""); }));
}

}  // namespace pre_tokenizer_test
}  // namespace ferry::rollout::text
