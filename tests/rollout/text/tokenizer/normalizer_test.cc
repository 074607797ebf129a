#include "rollout/text/tokenizer/normalizer.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout::text {
namespace normalizer_test {

using nlohmann::json;

std::string normalized(const char* settings, std::string_view text) {
  return Normalizer(json::parse(settings), "normalizer").normalize(text);
}

TEST(Normalizer, NullChangesNothing) {
  const Normalizer normalizer(json(), "normalizer");
  EXPECT_TRUE(normalizer.empty());
  EXPECT_EQ(normalizer.normalize(" \u212B "), " \u212B ");
}

TEST(Normalizer, NfcJoinsMarks) {
  EXPECT_EQ(normalized(R"({"type": "NFC"})", "e\u0301"), "\u00E9");
}

TEST(Normalizer, NfkdTakesLigaturesApart) {
  EXPECT_EQ(normalized(R"({"type": "NFKD"})", "\uFB01"), "fi");
}

TEST(Normalizer, LowercaseLowersEachCharacter) {
  EXPECT_EQ(normalized(R"({"type": "Lowercase"})", "A\u00C9"), "a\u00E9");
}

TEST(Normalizer, StripTakesWhiteSpaceFromBothEnds) {
  EXPECT_EQ(normalized(R"({"type": "Strip"})", "\u3000 a b\n"), "a b");
}

TEST(Normalizer, StripMayLeaveOneEnd) {
  EXPECT_EQ(normalized(R"({"type": "Strip", "strip_left": false})", " a "), " a");
}

TEST(Normalizer, StripMayLeaveNothing) {
  EXPECT_EQ(normalized(R"({"type": "Strip"})", " \n"), "");
}

TEST(Normalizer, PrependLeavesAnEmptyTextEmpty) {
  constexpr auto kPrepend = R"({"type": "Prepend", "prepend": "_"})";
  EXPECT_EQ(normalized(kPrepend, "a"), "_a");
  EXPECT_EQ(normalized(kPrepend, ""), "");
}

TEST(Normalizer, ReplaceTakesALiteral) {
  EXPECT_EQ(normalized(R"({"type": "Replace", "pattern": {"String": " "}, "content": "_"})", "a b"),
            "a_b");
}

TEST(Normalizer, ReplaceTakesARegularExpression) {
  EXPECT_EQ(
      normalized(R"({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "})", "a   b"),
      "a b");
}

TEST(Normalizer, ASequenceGoesInOrder) {
  EXPECT_EQ(normalized(R"({"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": " "}, {"type": "Strip"}, {"type": "Lowercase"}]})",
                       "A"),
            "a");
}

TEST(Normalizer, AnUnknownTypeIsRefused) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"normalizer: the type Nmt is not supported"},
                             [] { normalized(R"({"type": "Nmt"})", ""); }));
}

}  // namespace normalizer_test
}  // namespace ferry::rollout::text
