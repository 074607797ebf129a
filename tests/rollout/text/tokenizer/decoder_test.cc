#include "rollout/text/tokenizer/decoder.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace decoder_test {

using nlohmann::json;
using Tokens = std::vector<std::string>;

std::string decoded(const char* settings, const Tokens& tokens) {
  auto flowing = tokens;
  for (const auto& step : Decoder(json::parse(settings), "decoder").fresh_steps()) {
    Tokens out;
    for (const auto& token : flowing) step->push(token, out);
    step->finish(out);
    flowing = out;
  }
  std::string text;
  for (const auto& token : flowing) text += token;
  return text;
}

TEST(Decoder, NullJoinsTokensWithSpaces) {
  EXPECT_EQ(decoded("null", {"a", "b"}), "a b");
}

TEST(Decoder, ByteLevelPutsBytesTogether) {
  EXPECT_EQ(decoded(R"({"type": "ByteLevel"})", {"\u0120a", "\u00C3", "\u00A9"}), " a\u00E9");
}

TEST(Decoder, ByteLevelReplacesBrokenCharacters) {
  EXPECT_EQ(decoded(R"({"type": "ByteLevel"})", {"\u00C3", "a"}), "\uFFFDa");
}

TEST(Decoder, ByteLevelKeepsATokenOfOtherCharacters) {
  EXPECT_EQ(decoded(R"({"type": "ByteLevel"})", {"\u4E00"}), "\u4E00");
}

TEST(Decoder, ByteFallbackJoinsARunOfBytes) {
  EXPECT_EQ(decoded(R"({"type": "ByteFallback"})", {"a", "<0xC3>", "<0xA9>"}), "a\u00E9");
}

TEST(Decoder, ByteFallbackReplacesEachByteOfABrokenRun) {
  EXPECT_EQ(decoded(R"({"type": "ByteFallback"})", {"<0xC3>", "<0xA9>", "<0xC3>", "a"}),
            "\uFFFD\uFFFD\uFFFDa");
}

TEST(Decoder, ByteFallbackKeepsWhatIsNoByte) {
  EXPECT_EQ(decoded(R"({"type": "ByteFallback"})", {"<0xZZ>"}), "<0xZZ>");
}

TEST(Decoder, ReplaceWorksInEachToken) {
  EXPECT_EQ(
      decoded(R"({"type": "Replace", "pattern": {"String": "_"}, "content": " "})", {"_a", "b_"}),
      " ab ");
}

TEST(Decoder, MetaspaceDropsTheFirstMark) {
  EXPECT_EQ(decoded(R"({"type": "Metaspace", "replacement": "_"})", {"_a", "_b"}), "a b");
}

TEST(Decoder, StripTakesCharactersOffEachToken) {
  EXPECT_EQ(decoded(R"({"type": "Strip", "content": " ", "start": 1, "stop": 1})", {"  a ", " b"}),
            " ab");
}

TEST(Decoder, BehindFuseStripSeesOneToken) {
  EXPECT_EQ(decoded(R"({"type": "Sequence", "decoders": [
      {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})",
                    {" a", " b"}),
            "a b");
}

TEST(Decoder, AStopBehindFuseIsRefused) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"a stop behind Fuse or ByteLevel"}, [] {
    decoded(R"({"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]})",
            {});
  }));
}

TEST(Decoder, AnUnknownTypeIsRefused) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"the type CTC is not supported"},
                             [] { decoded(R"({"type": "CTC"})", {}); }));
}

}  // namespace decoder_test
}  // namespace ferry::rollout::text
