// What a tokenizer refuses, and streams; that it agrees with the tokenizers package is shown by
// tests/interop/rollout/test_tokenizer.py.
#include "rollout/text/tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rollout/text/regex/regex.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace tokenizer_test {

using nlohmann::ordered_json;
using support::fails;

// A byte-level tokenizer of all bytes, with the merges "ab" and "abc".
ordered_json byte_level() {
  auto vocab = ordered_json::object();
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string name;
    append_utf8(character_of_byte(static_cast<unsigned char>(byte)), name);
    vocab[name] = byte;
  }
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  return {
      {"version", "1.0"},
      {"added_tokens",
       {{{"id", 258}, {"content", "<s>"}, {"special", true}, {"normalized", false}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"vocab", vocab},
        {"merges", ordered_json::parse(R"([["a", "b"], ["ab", "c"]])")}}}};
}

std::vector<TokenId> ids_of(const ordered_json& json, std::string_view text) {
  return Tokenizer(json.dump(), "tokenizer.json").encode(text);
}

::testing::AssertionResult refuses(const std::string& text,
                                   const std::vector<std::string_view>& fragments,
                                   ErrorKind kind = ErrorKind::kCorrupt) {
  return fails(kind, fragments, [&] { Tokenizer(text, "tokenizer.json"); });
}

TEST(Tokenizer, MergesTheBestPairFirst) {
  EXPECT_EQ(ids_of(byte_level(), "abcab"), (std::vector<TokenId>{257, 256}));
  EXPECT_EQ(ids_of(byte_level(), "<s>ba<s>"), (std::vector<TokenId>{258, 'b', 'a', 258}));
  EXPECT_TRUE(ids_of(byte_level(), "").empty());
}

TEST(Tokenizer, MergesMayStandAsTheyDidBefore2024) {
  auto json = byte_level();
  json["model"]["merges"] = {"#version: 0.2", "a b", "ab c"};
  EXPECT_EQ(ids_of(json, "abc"), std::vector<TokenId>{257});
}

TEST(Tokenizer, AFileThatContradictsItselfIsNamed) {
  const auto with = [](auto change) {
    auto json = byte_level();
    change(json);
    return json.dump();
  };
  const auto text = byte_level().dump();
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
  const Tokenizer tokenizer(byte_level().dump(), "tokenizer.json");
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

TEST(Regex, GivesUpWhereItWouldTakeForever) {
  const Regex regex("(?:a|aa)+b");
  Regex::Stack stack;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"takes more than 10000000 steps"},
                    [&] { regex.find(std::string(60, 'a'), 0, stack); }));
}

TEST(Regex, RefusesByName) {
  const auto refused = [](std::string_view pattern, std::string_view what) {
    return fails(ErrorKind::kUsage, {pattern, what, "is not supported"}, [&] { Regex{pattern}; });
  };
  EXPECT_TRUE(refused("a(?<=b)", "a look-behind at byte 3"));
  EXPECT_TRUE(refused(R"((a)\1)", "this escape at byte 4"));
  EXPECT_TRUE(refused("[[:alpha:]]", "a POSIX bracket"));
  EXPECT_TRUE(refused("(?i:\xC3\xA9)", "case folding beyond ASCII"));
  EXPECT_TRUE(refused("(?i:ss)", "the case folding of two letters"));
  EXPECT_TRUE(refused("(?:a*)*", "a repetition of what can be empty"));
  EXPECT_TRUE(refused("a{2}+", "a count with a +"));
  EXPECT_TRUE(refused("(a", "a group without its )"));
  EXPECT_TRUE(refused("[a", "a bracket without its ]"));
  EXPECT_TRUE(refused("a)", "a ) without its ("));
  EXPECT_TRUE(refused("*a", "a quantifier of nothing"));
  EXPECT_TRUE(refused("a{9999}", "so large a count"));
  EXPECT_TRUE(refused(std::string(60, '(') + std::string(60, ')'), "so deep a nesting"));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"longer than"}, [] { Regex("(?:(?:ab{900}){900}){900}"); }));
}

}  // namespace tokenizer_test
}  // namespace ferry::rollout::text
