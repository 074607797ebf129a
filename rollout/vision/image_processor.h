// The input of a vision tower from an image: resized to whole tokens, normed, and cut into patches,
// as transformers' Qwen2VLImageProcessor does it by torchvision: the operations are LibTorch's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "models/vision/vision_model.h"

namespace ferry::rollout {

// In the names of preprocessor_config.json.
struct ImageProcessorConfig {
  std::int64_t shortest_edge = std::int64_t{56} * 56;        // pixels of a resized image, at least
  std::int64_t longest_edge = std::int64_t{28} * 28 * 1280;  // at most
  std::int64_t patch_size = 14;
  std::int64_t temporal_patch_size = 2;
  std::int64_t merge_size = 2;
  double rescale_factor = 1.0 / 255;
  std::array<double, 3> image_mean{0.48145466, 0.4578275, 0.40821073};
  std::array<double, 3> image_std{0.26862954, 0.26130258, 0.27577711};
};

// True if processor_config.json, of all that a model takes, or preprocessor_config.json say how
// images are read.
bool describes_images(std::string_view text, const std::string& source);

// Reads processor_config.json or preprocessor_config.json. Throws Error(kLayout) for a processor
// that does something else.
ImageProcessorConfig parse_image_processor(std::string_view text, const std::string& source);

struct ImageSize {
  std::int64_t height = 0;
  std::int64_t width = 0;
  bool operator==(const ImageSize&) const = default;
};

// The size that an image is resized to: multiples of `factor`, as much alike as the limits allow
// (smart_resize of transformers). Throws Error(kUsage) if one side is 200 times the other.
ImageSize smart_resize(ImageSize size, std::int64_t factor, const ImageProcessorConfig& config);

struct ProcessedImage {
  at::Tensor pixels{};  // [3, height, width], uint8: resized
  models::ImageGrid grid{};
};

// image [3, height, width], uint8.
ProcessedImage process_image(const at::Tensor& image, const ImageProcessorConfig& config);

// The tower's input: [patches, channels * frames * height * width of a patch], fp32.
at::Tensor pixel_values(const ProcessedImage& image, const ImageProcessorConfig& config);

}  // namespace ferry::rollout
