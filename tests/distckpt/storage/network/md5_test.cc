#include "distckpt/storage/network/md5.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/base/encodings.h"

namespace ferry::distckpt {
namespace md5_test {

Md5 digest(std::string_view text) {
  return md5(std::as_bytes(std::span(text)));
}

// RFC 1321, A.5.
TEST(Md5, HasTheDigestsOfTheStandard) {
  for (const auto& [text, expected] :
       std::initializer_list<std::pair<std::string_view, std::string_view>>{
           {"", "d41d8cd98f00b204e9800998ecf8427e"},
           {"a", "0cc175b9c0f1b6a831c399e269772661"},
           {"abc", "900150983cd24fb0d6963f7d28e17f72"},
           {"message digest", "f96b697d7cb7938d525a2f31aaf161d0"},
           {"abcdefghijklmnopqrstuvwxyz", "c3fcd3d76192e4007dfb496cca67e13b"},
           {"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789",
            "d174ab98d277d9f5a5611c2c9f419d9f"},
           {"12345678901234567890123456789012345678901234567890123456789012345678901234567890",
            "57edf4a22be3c955ac49da2e2107b67a"}})
    EXPECT_EQ(hex_text(digest(text)), expected) << text;
}

// The length's eight bytes just fit into the last block, or begin one more: md5sum says these.
TEST(Md5, PadsLengthsAroundTheEndOfABlock) {
  EXPECT_EQ(hex_text(digest(std::string(55, 'x'))), "04364420e25c512fd958a70738aa8f72");
  EXPECT_EQ(hex_text(digest(std::string(56, 'x'))), "668a72d5ba17f08e62dabcafad6db14b");
  EXPECT_EQ(hex_text(digest(std::string(64, 'x'))), "c1bb4f81d892b2d57947682aeb252456");
}

TEST(Md5, IsWrittenInBase64WithItsPadding) {
  EXPECT_EQ(base64_text(std::as_bytes(std::span<const std::uint8_t>(digest("")))),
            "1B2M2Y8AsgTpgAmY7PhCfg==");
}

}  // namespace md5_test
}  // namespace ferry::distckpt
