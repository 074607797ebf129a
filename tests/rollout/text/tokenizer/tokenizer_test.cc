// Whole tokenizers: ids, refusals and streams. tests/interop/rollout/test_tokenizer.py compares
// them with the tokenizers package.
#include "rollout/text/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"
#include "tests/support/encode_batch.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace tokenizer_test {

using nlohmann::ordered_json;
using support::fails;

std::vector<TokenId> ids_of(const ordered_json& json, std::string_view text) {
  return Tokenizer(json.dump(), "tokenizer.json").encode(text);
}

::testing::AssertionResult refuses(const std::string& text,
                                   const std::vector<std::string_view>& fragments,
                                   ErrorKind kind = ErrorKind::kCorrupt) {
  return fails(kind, fragments, [&] { Tokenizer(text, "tokenizer.json"); });
}

TEST(Tokenizer, MergesTheBestPairFirst) {
  EXPECT_EQ(ids_of(byte_level_tokenizer(), "abcab"), (std::vector<TokenId>{257, 256}));
}

TEST(Tokenizer, FindsAddedTokensBeforeAnythingElse) {
  EXPECT_EQ(ids_of(byte_level_tokenizer(), "<s>ba<s>"), (std::vector<TokenId>{258, 'b', 'a', 258}));
}

TEST(Tokenizer, AnEmptyTextHasNoTokens) {
  EXPECT_TRUE(ids_of(byte_level_tokenizer(), "").empty());
}

TEST(Tokenizer, BytesThatAreNotUtf8CountAsReplacements) {
  EXPECT_EQ(ids_of(byte_level_tokenizer(), "a\xFF"), (std::vector<TokenId>{'a', 0xEF, 0xBF, 0xBD}));
}

TEST(Tokenizer, AddsTheTokensOfThePostProcessorWhereAsked) {
  auto json = byte_level_tokenizer();
  json["post_processor"] = ordered_json::parse(
      R"({"type": "TemplateProcessing",
          "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
          "special_tokens": {"<s>": {"ids": [258]}}})");
  const Tokenizer tokenizer(json.dump(), "tokenizer.json");
  EXPECT_EQ(tokenizer.encode("b"), (std::vector<TokenId>{258, 'b'}));
  EXPECT_EQ(tokenizer.encode("b", {.add_special_tokens = false}), std::vector<TokenId>{'b'});
}

TEST(Tokenizer, DecodesWithoutSpecialTokensUnlessAsked) {
  const Tokenizer tokenizer(byte_level_tokenizer().dump(), "tokenizer.json");
  const std::vector<TokenId> ids{258, 257};
  EXPECT_EQ(tokenizer.decode(ids), "abc");
  EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = false}), "<s>abc");
}

TEST(Tokenizer, ThreadsThatShareItGetTheSameIds) {
  const Tokenizer tokenizer(byte_level_tokenizer().dump(), "tokenizer.json");
  const std::vector<std::string> texts{"ab", "", "<s>", "c"};
  const auto ids = support::encode_batch(tokenizer, texts, 3);
  ASSERT_EQ(ids.size(), texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(ids[i], tokenizer.encode(texts[i]));
}

TEST(Tokenizer, CountsAddedTokensThatTheVocabularyLacks) {
  EXPECT_EQ(Tokenizer(byte_level_tokenizer().dump(), "tokenizer.json").vocab_size(), 259);
}

TEST(Tokenizer, MergesMayStandAsTheyDidBefore2024) {
  auto json = byte_level_tokenizer();
  json["model"]["merges"] = {"#version: 0.2", "a b", "ab c"};
  EXPECT_EQ(ids_of(json, "abc"), std::vector<TokenId>{257});
}

TEST(Tokenizer, AFileThatContradictsItselfIsNamed) {
  const auto with = [](auto change) {
    auto json = byte_level_tokenizer();
    change(json);
    return json.dump();
  };
  const auto text = byte_level_tokenizer().dump();
  EXPECT_TRUE(refuses("", {"tokenizer.json", "not valid JSON at byte"}));
  EXPECT_TRUE(refuses(text.substr(0, text.size() / 2), {"not valid JSON at byte"}));
  EXPECT_TRUE(refuses("[]", {"not a JSON object"}));
  EXPECT_TRUE(refuses("{}", {"model is missing"}));
  EXPECT_TRUE(refuses(R"({"model": {}, "model": {}})", {"the key \"model\" occurs twice"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0, "a": 1}, "merges": []}})",
                      {"the key \"a\" occurs twice"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0, "b": 0}, "merges": []}})",
                      {"\"a\" and \"b\" both have the id 0"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": -1}}})", {"the token \"a\" has the id -1"}));
  EXPECT_TRUE(
      refuses(R"({"model": {"vocab": {"a": 999999999}, "merges": []}})", {"has the id 999999999"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": "x"}}})", {"model.vocab holds string"}));
  EXPECT_TRUE(
      refuses(R"({"model": {"vocab": ["a"]}})", {"model.vocab is missing, empty or no object"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0}, "merges": {}}})",
                      {"model.merges is missing or no array"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0}, "vocab": {"b": 1}, "merges": []}})",
                      {"the key \"vocab\" occurs twice"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0}, "merges": [["a"]]}})",
                      {"model.merges[0] has 1 tokens, not two"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0}, "merges": ["a"]}})",
                      {"model.merges[0] is \"a\", not two tokens"}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0}, "merges": [["a", "b"]]}})",
                      {"model.merges[0] has the token \"b\""}));
  EXPECT_TRUE(refuses(R"({"model": {"vocab": {"a": 0}, "merges": [["a", "a"]]}})",
                      {"model.merges[0] has the token \"aa\""}));
  EXPECT_TRUE(refuses(with([](auto& json) { json["added_tokens"][0]["id"] = 300; }),
                      {"added_tokens[0]", "\"<s>\" has the id 300, by the vocabulary it is 258"}));
  EXPECT_TRUE(
      refuses(with([](auto& json) { json["added_tokens"].push_back(json["added_tokens"][0]); }),
              {"added_tokens[1]", "\"<s>\" is added twice"}));
  EXPECT_TRUE(refuses(with([](auto& json) { json["decoder"].erase("type"); }),
                      {"decoder: type is missing"}));
  EXPECT_TRUE(refuses(with([](auto& json) { json["model"]["dropout"] = 0.1; }),
                      {"model: dropout is not supported"}, ErrorKind::kUsage));
  EXPECT_TRUE(refuses(with([](auto& json) {
                        json["pre_tokenizer"] = {
                            {"type", "Sequence"},
                            {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "Digits"}}}}};
                      }),
                      {"pre_tokenizer.pretokenizers[1]", "a pre-tokenizer behind ByteLevel"},
                      ErrorKind::kUsage));
}

TEST(DecodeStream, HoldsBackWhatIsNoCharacterYet) {
  const Tokenizer tokenizer(byte_level_tokenizer().dump(), "tokenizer.json");
  DecodeStream stream(tokenizer);
  EXPECT_EQ(stream.push(256), "ab");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push(258), "");  // a special token, which is left out
  EXPECT_EQ(stream.push(0x98), "");
  EXPECT_EQ(stream.push(0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push('x'), "\xEF\xBF\xBDx");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
}

}  // namespace tokenizer_test
}  // namespace ferry::rollout::text
