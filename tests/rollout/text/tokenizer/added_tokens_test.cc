#include "rollout/text/tokenizer/added_tokens.h"

#include <gtest/gtest.h>

#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace added_tokens_test {

using nlohmann::ordered_json;

// Added tokens over a vocabulary of one token, so that ids begin at 1.
class Added {
 public:
  explicit Added(const char* tokens, const char* normalizer = "null")
      : file_(read(ordered_json::parse(tokens))),
        model_(file_, false),
        normalizer_(nlohmann::json::parse(normalizer), "normalizer"),
        tokens_(file_, model_, normalizer_) {}

  // "ab[1]c": the stretches of a text, tokens as their ids.
  std::string split(std::string_view text, bool normalized = false) const {
    std::vector<AddedTokens::Stretch> stretches;
    tokens_.split(text, normalized, stretches);
    std::string found;
    for (const auto& [begin, end, id] : stretches) {
      found += id == kNoToken ? std::string(text.substr(begin, end - begin))
                              : "[" + std::to_string(id) + "]";
    }
    return found;
  }
  const AddedTokens& operator*() const { return tokens_; }

 private:
  static TokenizerFile read(ordered_json tokens) {
    auto json = character_tokenizer({"a"}, {});
    TokenId id = 1;
    for (auto& token : tokens) {
      if (!token.contains("id")) token["id"] = id++;
      if (!token.contains("normalized")) token["normalized"] = false;
    }
    json["added_tokens"] = tokens;
    return parse_tokenizer_file(json.dump(), "t.json");
  }

  TokenizerFile file_;
  Bpe model_;
  Normalizer normalizer_;
  AddedTokens tokens_;
};

TEST(AddedTokens, TheLongestTokenAtAPlaceIsFound) {
  EXPECT_EQ(Added(R"([{"content": "<s"}, {"content": "<s>"}])").split("a<s>b<s"), "a[2]b[1]");
}

TEST(AddedTokens, TheLeftmostTokenIsFoundFirst) {
  EXPECT_EQ(Added(R"([{"content": "xy"}, {"content": "yzz"}])").split("xyzz"), "[1]zz");
}

TEST(AddedTokens, ATokenMayTakeTheWhiteSpaceOnItsLeft) {
  EXPECT_EQ(Added(R"([{"content": "M", "lstrip": true}])").split("a \n M b"), "a[1] b");
}

TEST(AddedTokens, ATokenMayTakeTheWhiteSpaceOnItsRight) {
  EXPECT_EQ(Added(R"([{"content": "M", "rstrip": true}])").split("a M \u3000b"), "a [1]b");
}

TEST(AddedTokens, WhiteSpaceBetweenTwoTokensIsTakenOnce) {
  EXPECT_EQ(Added(R"([{"content": "M", "lstrip": true, "rstrip": true}])").split("M  M"), "[1][1]");
}

TEST(AddedTokens, ASingleWordIsNotFoundInsideAnother) {
  EXPECT_EQ(
      Added(R"([{"content": "the", "single_word": true}])").split("the lathe -the- \u00E9the"),
      "[1] lathe -[1]- \u00E9the");
}

TEST(AddedTokens, ANormalizedTokenIsFoundInNormalizedText) {
  const Added added(R"([{"content": "ABC", "normalized": true}])", R"({"type": "Lowercase"})");
  EXPECT_EQ(added.split("abc", true), "[1]");
  EXPECT_EQ(added.split("ABC", false), "ABC");
}

TEST(AddedTokens, ATokenOfTheVocabularyKeepsItsId) {
  EXPECT_EQ(Added(R"([{"content": "a", "id": 0}])").split("ba"), "b[0]");
}

TEST(AddedTokens, SpecialOnesAreKnown) {
  const Added added(R"([{"content": "<s>", "special": true}, {"content": "x"}])");
  EXPECT_TRUE((*added).is_special("<s>"));
  EXPECT_FALSE((*added).is_special("x"));
}

TEST(AddedTokens, AreFoundByTextAndById) {
  const Added added(R"([{"content": "<s>"}])");
  ASSERT_NE((*added).find("<s>"), nullptr);
  EXPECT_EQ((*added).find("<s>"), (*added).find(1));
  EXPECT_EQ((*added).find(7), nullptr);
}

TEST(AddedTokens, AnEmptyContentIsCorrupt) {
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"added_tokens[0]", "content is empty"},
                             [] { Added(R"([{"content": ""}])"); }));
}

}  // namespace added_tokens_test
}  // namespace ferry::rollout::text
