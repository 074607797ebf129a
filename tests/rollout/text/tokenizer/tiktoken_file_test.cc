// Tokenizers of a tiktoken.model. tests/interop/rollout/test_tiktoken.py compares them with the
// tiktoken package.
#include "rollout/text/tokenizer/tiktoken_file.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/encodings.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace tiktoken_file_test {

using support::fails;
using Files = std::map<std::string, std::string>;

std::string line(std::string_view token, std::size_t rank) {
  return fmt::format("{} {}\n", base64_text(std::as_bytes(std::span(token))), rank);
}

// The bytes, each at its own rank, and behind them "ab", "bab" (of which "ab" is a part), "aba".
std::string model() {
  std::string text;
  std::size_t rank = 0;
  for (; rank < 256; ++rank) {
    const auto byte = static_cast<char>(rank);
    text += line({&byte, 1}, rank);
  }
  for (const char* token : {"ab", "bab", "aba"}) text += line(token, rank++);
  return text;
}
constexpr TokenId kAb = 256, kBab = 257, kAba = 258, kFirstSpecial = 259;

std::string config(std::string_view members) {
  return fmt::format(R"({{"tokenizer_class": "TikTokenTokenizer", {}}})", members);
}
constexpr std::string_view kNames =
    R"("added_tokens_decoder": {"259": {"content": "[BOS]"}, "261": {"content": "<think>"}}, "bos_token": "[BOS]")";

ModelFiles folder(Files files) {
  return ModelFiles(
      [files = std::move(files)](const std::string& name) -> std::optional<std::string> {
        const auto found = files.find(name);
        return found == files.end() ? std::nullopt : std::optional(found->second);
      },
      "folder");
}

std::unique_ptr<Tokenizer> tokenizer(const std::string& text = model(),
                                     const std::string& settings = config(kNames)) {
  return Tokenizer::from_files(
      folder({{kTiktokenModel, text}, {"tokenizer_config.json", settings}}));
}

::testing::AssertionResult refuses(const std::string& text,
                                   const std::vector<std::string_view>& fragments) {
  return fails(ErrorKind::kCorrupt, fragments, [&] { tokenizer(text); });
}

TEST(TiktokenFile, MergesThePairWhoseTokenHasTheLowestRank) {
  EXPECT_EQ(tokenizer()->encode("xbab"), (std::vector<TokenId>{'x', kBab}));
  EXPECT_EQ(tokenizer()->encode("xabab"), (std::vector<TokenId>{'x', kAb, kAb}));
  EXPECT_EQ(tokenizer()->encode("aba"), std::vector<TokenId>{kAba});
}

TEST(TiktokenFile, NamesSpecialTokensAndReservesTheOthers) {
  const auto made = tokenizer();
  EXPECT_EQ(made->vocab_size(), 259U + 256U);
  EXPECT_EQ(made->encode("a[BOS]<|reserved_token_260|><think>"),
            (std::vector<TokenId>{'a', kFirstSpecial, kFirstSpecial + 1, kFirstSpecial + 2}));
  EXPECT_EQ(made->id_to_token(514), "<|reserved_token_514|>");
  EXPECT_EQ(made->id_to_token(515), std::nullopt);
}

TEST(TiktokenFile, SkipsTokensThatHaveARole) {
  const auto made = tokenizer();
  EXPECT_EQ(made->decode(made->encode("[BOS]a<think><|reserved_token_260|>")),
            "a<think><|reserved_token_260|>");
}

TEST(TiktokenFile, TokenizerJsonGoesBeforeIt) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"folder/tokenizer.json"}, [] {
    Tokenizer::from_files(folder({{kTiktokenModel, model()}, {"tokenizer.json", "{"}}));
  }));
}

TEST(TiktokenFile, AFolderWithoutBothIsNamed) {
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"folder: ", "tokenizer.json", "tiktoken.model"},
                    [] { Tokenizer::from_files(folder({})); }));
  EXPECT_EQ(Tokenizer::find_in(folder({})), nullptr);
}

TEST(TiktokenFile, NeedsTheNamesOfSpecialTokens) {
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"tokenizer_config.json", "special tokens"}, [] {
    Tokenizer::from_files(folder({{kTiktokenModel, model()}}));
  }));
}

TEST(TiktokenFile, RefusesLinesThatAreNoTokenAndRank) {
  EXPECT_TRUE(refuses("YQ== 0\n@@@@ 1\n", {"line 2", "@@@@", "base64"}));
  EXPECT_TRUE(refuses("YQ== 0\n\nYg==\n", {"line 3", "its rank"}));
  EXPECT_TRUE(refuses("YQ== one\n", {"line 1", "its rank"}));
  EXPECT_TRUE(refuses("YQ== -1\n", {"line 1", "its rank"}));
  EXPECT_TRUE(refuses("", {"no tokens"}));
}

TEST(TiktokenFile, RefusesRanksThatAreMissingOrOccurTwice) {
  EXPECT_TRUE(refuses("YQ== 0\nYg== 2\n", {"no token has the rank 1"}));
  EXPECT_TRUE(refuses("YQ== 0\nYg== 0\n", {"two tokens have the rank 0"}));
  EXPECT_TRUE(refuses("YQ== 0\nYQ== 1\n", {"\"a\" has the ranks 0 and 1"}));
  EXPECT_TRUE(refuses("YQ== 0\n", {"the byte 0x00 has no rank"}));
}

TEST(TiktokenFile, RefusesSpecialTokensBesideTheirPlaces) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"added_tokens_decoder", "the id 515", "259 to 514"}, [] {
    tokenizer(model(), config(R"("added_tokens_decoder": {"515": {"content": "x"}})"));
  }));
}

TEST(TiktokenFile, RefusesOtherClassesAndPatterns) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"OtherTokenizer", "TikTokenTokenizer"},
                    [] { tokenizer(model(), R"({"tokenizer_class": "OtherTokenizer"})"); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"tokenization_kimi.py", "pat_str"}, [] {
    const auto settings =
        config(R"("auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]})");
    Tokenizer::from_files(folder({{kTiktokenModel, model()},
                                  {"tokenizer_config.json", settings},
                                  {"tokenization_kimi.py", "pat_str = r'\\s+'"}}));
  }));
}

}  // namespace tiktoken_file_test
}  // namespace ferry::rollout::text
