#include "rollout/text/tokenizer/tokenizer_file.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace tokenizer_file_test {

using nlohmann::json;
using support::fails;

TEST(TokenizerFile, VocabularyAndMergesAreNotAmongTheSettings) {
  const auto file = parse_tokenizer_file(
      R"({"model": {"type": "BPE", "vocab": {"b": 1, "a": 0}, "merges": [["a", "b"]]}})", "t");
  ASSERT_EQ(file.vocab.size(), 2);
  EXPECT_EQ(file.vocab[0], (std::pair<std::string, TokenId>("b", 1)));
  EXPECT_EQ(file.merges[0], (std::pair<std::string, std::string>("a", "b")));
  EXPECT_EQ(file.settings["model"], json({{"type", "BPE"}}));
}

TEST(TokenizerFile, AVocabularyElsewhereIsASetting) {
  const auto file = parse_tokenizer_file(R"({"x": {"vocab": {"a": 0}}})", "t");
  EXPECT_FALSE(file.has_vocab);
  EXPECT_EQ(file.settings["x"]["vocab"]["a"], 0);
}

TEST(TokenizerFile, TextBehindANulIsAnError) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"t: is not valid JSON at byte 2"},
                    [] { parse_tokenizer_file(std::string_view("{}\0x", 4), "t"); }));
}

TEST(TokenizerFile, DeepNestingIsAnError) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"nested more than 64 levels deep"}, [] {
    parse_tokenizer_file("{\"a\": " + std::string(100, '[') + std::string(100, ']') + "}", "t");
  }));
}

TEST(Component, AMissingMemberIsNamedWithItsPlace) {
  const json settings{{"type", "X"}};
  const Component part(settings, "decoder");
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"decoder: content is missing"}, [&] { part.string("content"); }));
}

TEST(Component, AFlagHasADefault) {
  const json settings{{"type", "X"}, {"a", nullptr}, {"b", false}};
  const Component part(settings, "decoder");
  EXPECT_TRUE(part.flag("a", true));
  EXPECT_FALSE(part.flag("b", true));
}

TEST(Component, ACharacterIsExactlyOne) {
  const json settings{{"type", "X"}, {"one", "\u2581"}, {"two", "ab"}};
  const Component part(settings, "decoder");
  EXPECT_EQ(part.character("one"), U'\u2581');
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"two is \"ab\", not one character"},
                    [&] { part.character("two"); }));
}

TEST(Component, APatternIsAStringOrARegex) {
  const json settings{{"type", "X"}, {"a", {{"String", "."}}}, {"b", {{"Regex", "."}}}, {"c", "."}};
  const Component part(settings, "decoder");
  EXPECT_FALSE(part.pattern("a").first);
  EXPECT_TRUE(part.pattern("b").first);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"c is neither a String nor a Regex"},
                    [&] { part.pattern("c"); }));
}

}  // namespace tokenizer_file_test
}  // namespace ferry::rollout::text
