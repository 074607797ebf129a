// Images that the HTTP server and the engines of its process decode once.
#include "serve/bridge/decoded_images.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::serve {
namespace decoded_images_test {

using support::fails;

// One red pixel.
std::string png() {
  return std::string(
      "\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\b\2\0\0\0\x90wS\xde"
      "\0\0\0\fIDATx\x9c"
      "c\xf8\xcf\xc0\0\0\3\1\1\0\xc9\xfe\x92\xef"
      "\0\0\0\0IEND\xae"
      "B`\x82",
      69);
}

ImageFiles chat() {
  return std::make_shared<const std::vector<std::string>>(std::vector{png(), png()});
}

const rollout::ImageReader kReader{.config = {.shortest_edge = 1024, .patch_size = 4},
                                   .placeholder = "<i>"};
constexpr std::int64_t kChatBytes = std::int64_t{2} * 3 * 32 * 32;

TEST(DecodedImages, AreDecodedOnceForAChat) {
  DecodedImages images(kReader);
  const auto files = chat();
  const auto first = images.read(files);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[1].pixels.nbytes(), kChatBytes / 2);
  EXPECT_EQ(images.read(files)[1].pixels.const_data_ptr(), first[1].pixels.const_data_ptr());
  EXPECT_EQ(images.num_decoded(), 1);
}

TEST(DecodedImages, OfAnotherChatAreOthersThoughTheirBytesAreTheSame) {
  DecodedImages images(kReader);
  const auto one = chat(), other = chat();
  (void)images.read(one);
  (void)images.read(other);
  (void)images.read(one);
  EXPECT_EQ(images.num_decoded(), 2);
}

TEST(DecodedImages, AreHeldWhileThereIsRoom) {
  DecodedImages images(kReader, kChatBytes);
  const auto one = chat(), other = chat();
  (void)images.read(one);
  (void)images.read(other);
  (void)images.read(other);
  EXPECT_EQ(images.num_decoded(), 2);
  (void)images.read(one);
  EXPECT_EQ(images.num_decoded(), 3);
}

TEST(DecodedImages, OfAChatThatHasEndedMakeRoom) {
  DecodedImages images(kReader, 2 * kChatBytes);
  const auto one = chat();
  (void)images.read(one);
  (void)images.read(chat());
  (void)images.read(chat());
  (void)images.read(one);
  EXPECT_EQ(images.num_decoded(), 3);
}

TEST(DecodedImages, NameAFileThatIsNone) {
  DecodedImages images(kReader);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"neither JPEG nor PNG"}, [&] {
    images.read(std::make_shared<const std::vector<std::string>>(std::vector<std::string>{"no"}));
  }));
}

}  // namespace decoded_images_test
}  // namespace ferry::serve
