// Settings and sizes of images. The interop suite compares pixels with those of transformers.
#include "rollout/vision/image_processor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/expect.h"

namespace ferry::rollout {
namespace image_processor_test {

using support::fails;

TEST(SmartResize, RoundsToMultiplesHalvesToEven) {
  const ImageProcessorConfig config{.shortest_edge = 1, .longest_edge = 1 << 30};
  EXPECT_EQ(smart_resize({.height = 45, .width = 60}, 32, config),
            (ImageSize{.height = 32, .width = 64}));
  EXPECT_EQ(smart_resize({.height = 80, .width = 112}, 32, config),  // 2.5 and 3.5
            (ImageSize{.height = 64, .width = 128}));
}

TEST(SmartResize, ShrinksALargeImageBelowTheLimit) {
  const ImageProcessorConfig config{.shortest_edge = 1, .longest_edge = 100 * 100};
  const auto size = smart_resize({.height = 400, .width = 100}, 10, config);
  EXPECT_EQ(size, (ImageSize{.height = 200, .width = 50}));
  EXPECT_LE(size.height * size.width, config.longest_edge);
}

TEST(SmartResize, KeepsOneTokenOfANarrowImage) {
  const ImageProcessorConfig config{.shortest_edge = 1, .longest_edge = 1000};
  EXPECT_EQ(smart_resize({.height = 1500, .width = 10}, 10, config).width, 10);
}

TEST(SmartResize, WidensASmallImageToTheLimit) {
  const ImageProcessorConfig config{.shortest_edge = 100 * 100, .longest_edge = 1 << 30};
  const auto size = smart_resize({.height = 20, .width = 30}, 10, config);
  EXPECT_GE(size.height * size.width, config.shortest_edge);
  EXPECT_EQ(size, (ImageSize{.height = 90, .width = 130}));
}

TEST(SmartResize, RefusesAnImageThatIsTooNarrow) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"2010 x 10"},
                    [] { smart_resize({.height = 2010, .width = 10}, 10, {}); }));
}

TEST(ImageProcessor, ReadsItsSettings) {
  const auto config = parse_image_processor(
      R"({"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 3,
          "size": {"shortest_edge": 100, "longest_edge": 200}, "image_mean": [0.5, 0.25, 0.125]})",
      "preprocessor_config.json");
  EXPECT_EQ(config.patch_size, 16);
  EXPECT_EQ(config.merge_size, 3);
  EXPECT_EQ(config.shortest_edge, 100);
  EXPECT_EQ(config.longest_edge, 200);
  EXPECT_EQ(config.image_mean[1], 0.25);
  EXPECT_EQ(config.temporal_patch_size, 2);
}

TEST(ImageProcessor, IsThatOfAProcessorOfAllThatAModelTakes) {
  const auto* const text = R"({"image_processor": {"patch_size": 8}, "processor_class": "Q"})";
  EXPECT_TRUE(describes_images(text, "processor_config.json"));
  EXPECT_EQ(parse_image_processor(text, "processor_config.json").patch_size, 8);
  EXPECT_FALSE(describes_images(R"({"processor_class": "Q"})", "processor_config.json"));
}

TEST(ImageProcessor, RefusesWhatItDoesNotDo) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"image_processor_type", "LlavaImageProcessor"}, [] {
    parse_image_processor(R"({"image_processor_type": "LlavaImageProcessor"})", "config");
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"resample is 2"},
                    [] { parse_image_processor(R"({"resample": 2})", "config"); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"do_normalize"},
                    [] { parse_image_processor(R"({"do_normalize": false})", "config"); }));
}

TEST(ProcessImage, LeavesAnImageAloneThatFits) {
  const ImageProcessorConfig config{
      .shortest_edge = 1, .longest_edge = 1 << 20, .patch_size = 2, .merge_size = 2};
  const auto image = at::randint(0, 256, {3, 8, 12}, at::kByte);
  const auto processed = process_image(image, config);
  EXPECT_TRUE(at::equal(processed.pixels, image));
  EXPECT_EQ(processed.grid.height, 4);
  EXPECT_EQ(processed.grid.width, 6);
  const auto pixels = pixel_values(processed, config);
  EXPECT_EQ(pixels.sizes(), (std::vector<std::int64_t>{24, 3 * 2 * 2 * 2}));
}

}  // namespace image_processor_test
}  // namespace ferry::rollout
