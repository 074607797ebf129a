// The text that stands for images: a placeholder for each token of each.
#include "rollout/vision/prompt_images.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::rollout {
namespace prompt_images_test {

using support::fails;

const ImageReader kReader{.config = {.merge_size = 2}, .placeholder = "<i>"};

// An image of so many tokens, each of 2 x 2 patches, side by side.
ProcessedImage image(std::int64_t tokens) {
  return {.grid = {.frames = 1, .height = 2, .width = 2 * tokens}};
}

TEST(ExpandPlaceholders, WritesOneForEachTokenOfAnImage) {
  const std::vector images{image(3), image(1)};
  EXPECT_EQ(expand_placeholders("a<i>b<i>c", images, kReader), "a<i><i><i>b<i>c");
}

TEST(ExpandPlaceholders, LeavesTextWithoutImagesAsItIs) {
  EXPECT_EQ(expand_placeholders("a <i", {}, kReader), "a <i");
}

TEST(ExpandPlaceholders, GoesOnInTheNextTextWhereTheLastEnded) {
  const std::vector images{image(1), image(2), image(3)};
  std::size_t next = 0;
  EXPECT_EQ(expand_placeholders("<i><i>", images, kReader, next), "<i><i><i>");
  EXPECT_EQ(next, 2U);
  EXPECT_EQ(expand_placeholders("x<i>", images, kReader, next), "x<i><i><i>");
  EXPECT_EQ(next, 3U);
}

TEST(ExpandPlaceholders, CountsPlaceholdersAndImages) {
  const std::vector images{image(1)};
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"the chat template writes 2 <i>, and the messages have 1 images"},
                    [&] { expand_placeholders("<i><i>", images, kReader); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"writes 0 <i>"},
                    [&] { expand_placeholders("text", images, kReader); }));
}

TEST(ReadImages, NamesTheImageThatIsNone) {
  const std::vector<text::ImageSource> sources{{.place = "data:image/png;base64,Zm9vYmFy"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"data:image/png;base64,Zm9vYmFy"},
                    [&] { read_images(sources, kReader); }));
}

}  // namespace prompt_images_test
}  // namespace ferry::rollout
