#include "rollout/text/tokenizer/incremental_detokenizer.h"

#include <gtest/gtest.h>

#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"

namespace ferry::rollout::text {
namespace incremental_detokenizer_test {

using Parts = std::vector<std::string>;

// The text of each token, until a stop string ends it, and the rest.
Parts parts(const nlohmann::ordered_json& json,
            const std::vector<TokenId>& prompt,
            const std::vector<TokenId>& ids,
            DetokenizerOptions options = {}) {
  const Tokenizer tokenizer(json.dump(), "t.json");
  IncrementalDetokenizer detokenizer(tokenizer, prompt, std::move(options));
  Parts found;
  for (const auto id : ids) {
    if (!detokenizer.stop_reason()) found.push_back(detokenizer.update(id));
  }
  found.push_back(detokenizer.finish());
  return found;
}
Parts bytes(const std::vector<TokenId>& ids, DetokenizerOptions options = {}) {
  return parts(byte_level_tokenizer(), {}, ids, std::move(options));
}

TEST(IncrementalDetokenizer, EachTokenGivesItsText) {
  EXPECT_EQ(bytes({'a', 256}), (Parts{"a", "ab", ""}));
}

TEST(IncrementalDetokenizer, APartOfACharacterIsHeldBack) {
  EXPECT_EQ(bytes({0xC3, 0xA9}), (Parts{"", "\u00E9", ""}));
}

TEST(IncrementalDetokenizer, ABrokenCharacterEndsAsAReplacement) {
  EXPECT_EQ(bytes({0xC3}), (Parts{"", "\uFFFD"}));
}

TEST(IncrementalDetokenizer, TheTextEndsBeforeAStopString) {
  EXPECT_EQ(bytes({'a', 'x', 'y', 'b'}, {.stop = {"xy"}}), (Parts{"a", "", "", ""}));
}

TEST(IncrementalDetokenizer, TheBeginningOfAStopStringIsGivenLater) {
  EXPECT_EQ(bytes({'x', 'b'}, {.stop = {"xy"}}), (Parts{"", "xb", ""}));
}

TEST(IncrementalDetokenizer, TheBeginningOfAStopStringIsGivenAtTheEnd) {
  EXPECT_EQ(bytes({'x'}, {.stop = {"xy"}}), (Parts{"", "x"}));
}

TEST(IncrementalDetokenizer, OfTwoStopStringsTheFirstInTheTextCounts) {
  const Tokenizer tokenizer(byte_level_tokenizer().dump(), "t.json");
  IncrementalDetokenizer detokenizer(tokenizer, {}, {.stop = {"c", "b"}});
  EXPECT_EQ(detokenizer.update(257), "a");  // "abc"
  EXPECT_EQ(detokenizer.stop_reason(), "b");
}

TEST(IncrementalDetokenizer, NothingStopsBeforeMinTokens) {
  EXPECT_EQ(bytes({'x', 'a', 'x'}, {.stop = {"x"}, .min_tokens = 2}), (Parts{"x", "a", "", ""}));
}

TEST(IncrementalDetokenizer, SpecialTokensAreLeftOutUnlessAsked) {
  EXPECT_EQ(bytes({258, 'a'}), (Parts{"", "a", ""}));
  EXPECT_EQ(bytes({258}, {.skip_special_tokens = false}), (Parts{"<s>", ""}));
}

TEST(IncrementalDetokenizer, AWordKeepsTheSpaceBehindAPrompt) {
  auto json = character_tokenizer({"_a", "_b"}, {});
  json["decoder"] = {{"type", "Metaspace"}, {"replacement", "_"}};
  EXPECT_EQ(parts(json, {0}, {1}), (Parts{" b", ""}));
  EXPECT_EQ(parts(json, {}, {1}), (Parts{"b", ""}));
}

TEST(IncrementalDetokenizer, ACharacterThatThePromptBeganBelongsToTheAnswer) {
  EXPECT_EQ(parts(byte_level_tokenizer(), {'a', 0xC3}, {0xA9}), (Parts{"\u00E9", ""}));
}

}  // namespace incremental_detokenizer_test
}  // namespace ferry::rollout::text
