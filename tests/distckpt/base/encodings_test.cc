#include "distckpt/base/encodings.h"

#include <gtest/gtest.h>

namespace ferry {
namespace encodings_test {

std::string base64_of(std::string_view bytes) {
  return base64_text(std::as_bytes(std::span(bytes)));
}

// RFC 4648, section 10.
TEST(Base64, HasTheTextsOfItsStandard) {
  EXPECT_EQ(base64_of(""), "");
  EXPECT_EQ(base64_of("f"), "Zg==");
  EXPECT_EQ(base64_of("fo"), "Zm8=");
  EXPECT_EQ(base64_of("foo"), "Zm9v");
  EXPECT_EQ(base64_of("foob"), "Zm9vYg==");
}

TEST(Base64, GivesAllBytesBack) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  for (const auto some : {std::string_view(bytes), std::string_view(bytes).substr(1)})
    EXPECT_EQ(base64_bytes(base64_of(some)), some);
}

TEST(Base64, MayLackItsPadding) {
  EXPECT_EQ(base64_bytes("Zm9vYg"), "foob");
}

TEST(Base64, IsNothingElse) {
  for (const auto* text : {"Z", "Zm9v\n", "Zm-_", "====", "Z=g="})
    EXPECT_EQ(base64_bytes(text), std::nullopt) << text;
}

TEST(PercentDecoded, TakesTwoDigitsForAByte) {
  EXPECT_EQ(percent_decoded("a%20b%c3%A9"), "a b\xc3\xa9");
}

TEST(PercentDecoded, LeavesWhatIsNotWellEncoded) {
  for (const auto* text : {"100%", "%4", "%zz", "%-1", "a+b"})
    EXPECT_EQ(percent_decoded(text), text);
}

TEST(PercentDecoded, HasSpacesForPlusesInAQuery) {
  EXPECT_EQ(percent_decoded("a+b%2B", true), "a b+");
}

}  // namespace encodings_test
}  // namespace ferry
