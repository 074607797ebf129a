#include "rollout/vision/image_processor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::rollout {
namespace {

using nlohmann::json;

// PIL's number.
constexpr std::int64_t kBicubic = 3;
constexpr double kMostUneven = 200;

class ProcessorFields {
 public:
  ProcessorFields(const json& object, const std::string& source)
      : object_(object), source_(source) {}

  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  void read_size(const char* key, std::int64_t& into) const {
    const auto* const value = find(key);
    if (value == nullptr) return;
    into = distckpt::json_int(*value, key, source_);
    require(into > 0, ErrorKind::kCorrupt, "{}: {} is {}", source_, key, into);
  }
  void read_number(const char* key, double& into) const {
    const auto* const value = find(key);
    if (value == nullptr) return;
    require(value->is_number() && value->get<double>() > 0, ErrorKind::kCorrupt,
            "{}: {} is {}, not a number above 0", source_, key, value->dump());
    into = value->get<double>();
  }
  void read_channels(const char* key, std::array<double, 3>& into) const {
    const auto* const value = find(key);
    if (value == nullptr) return;
    require(value->is_array() && value->size() == into.size() &&
                std::ranges::all_of(*value, [](const json& one) { return one.is_number(); }),
            ErrorKind::kCorrupt, "{}: {} is {}, not three numbers", source_, key, value->dump());
    for (std::size_t i = 0; i < into.size(); ++i) into[i] = (*value)[i].get<double>();
  }
  void require_on(const char* key) const {
    const auto* const value = find(key);
    if (value == nullptr) return;
    require(*value == json(true), ErrorKind::kLayout, "{}: {} is {}, which is not handled", source_,
            key, value->dump());
  }

 private:
  const json& object_;
  const std::string& source_;
};

// Python's round(): halves to even.
std::int64_t rounded(double value) {
  return static_cast<std::int64_t>(std::nearbyint(value));
}

constexpr const char* kOfAll = "image_processor";

}  // namespace

bool describes_images(std::string_view text, const std::string& source) {
  const auto file = distckpt::parse_json(text, source);
  return file.is_object() && (file.contains(kOfAll) || file.contains("patch_size"));
}

ImageProcessorConfig parse_image_processor(std::string_view text, const std::string& source) {
  const auto file = distckpt::parse_json(text, source);
  require(file.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", source);
  const auto nested = file.find(kOfAll);
  const auto& object = nested != file.end() && nested->is_object() ? *nested : file;
  const ProcessorFields fields(object, source);
  if (const auto* const type = fields.find("image_processor_type"); type != nullptr) {
    const auto name = distckpt::json_string(*type, "image_processor_type", source);
    require(name.starts_with("Qwen2VLImageProcessor"), ErrorKind::kLayout,
            "{}: image_processor_type is \"{}\", only Qwen2VLImageProcessor is handled", source,
            name);
  }
  for (const auto* key : {"do_resize", "do_rescale", "do_normalize", "do_convert_rgb"})
    fields.require_on(key);
  ImageProcessorConfig config;
  auto resample = kBicubic;
  fields.read_size("resample", resample);
  require(resample == kBicubic, ErrorKind::kLayout, "{}: resample is {}, only {} is handled",
          source, resample, kBicubic);
  if (const auto* const size = fields.find("size"); size != nullptr && size->is_object()) {
    const ProcessorFields of_size(*size, source);
    of_size.read_size("shortest_edge", config.shortest_edge);
    of_size.read_size("longest_edge", config.longest_edge);
  }
  fields.read_size("min_pixels", config.shortest_edge);
  fields.read_size("max_pixels", config.longest_edge);
  fields.read_size("patch_size", config.patch_size);
  fields.read_size("temporal_patch_size", config.temporal_patch_size);
  fields.read_size("merge_size", config.merge_size);
  fields.read_number("rescale_factor", config.rescale_factor);
  fields.read_channels("image_mean", config.image_mean);
  fields.read_channels("image_std", config.image_std);
  return config;
}

ImageSize smart_resize(ImageSize size, std::int64_t factor, const ImageProcessorConfig& config) {
  const auto height = static_cast<double>(size.height);
  const auto width = static_cast<double>(size.width);
  const auto step = static_cast<double>(factor);
  require(std::max(height, width) / std::min(height, width) <= kMostUneven, ErrorKind::kUsage,
          "an image of {} x {} pixels is not resized: one side is more than {} times the other",
          size.height, size.width, kMostUneven);
  ImageSize to{.height = rounded(height / step) * factor, .width = rounded(width / step) * factor};
  const auto part = [&](double of) { return static_cast<std::int64_t>(of) * factor; };
  if (to.height * to.width > config.longest_edge) {
    const auto beta = std::sqrt(height * width / static_cast<double>(config.longest_edge));
    to.height = std::max(factor, part(std::floor(height / beta / step)));
    to.width = std::max(factor, part(std::floor(width / beta / step)));
  } else if (to.height * to.width < config.shortest_edge) {
    const auto beta = std::sqrt(static_cast<double>(config.shortest_edge) / (height * width));
    to.height = part(std::ceil(height * beta / step));
    to.width = part(std::ceil(width * beta / step));
  }
  return to;
}

ProcessedImage process_image(const at::Tensor& image, const ImageProcessorConfig& config) {
  const ImageSize size{.height = image.size(1), .width = image.size(2)};
  const auto to = smart_resize(size, config.patch_size * config.merge_size, config);
  const auto pixels =
      to == size ? image
                 : at::_upsample_bicubic2d_aa(image.unsqueeze(0), {to.height, to.width},
                                              /*align_corners=*/false, std::nullopt, std::nullopt)
                       .squeeze(0);
  return {.pixels = pixels.contiguous(),
          .grid = {.frames = 1,
                   .height = to.height / config.patch_size,
                   .width = to.width / config.patch_size}};
}

at::Tensor pixel_values(const ProcessedImage& image, const ImageProcessorConfig& config) {
  const auto patch = config.patch_size;
  const auto merge = config.merge_size;
  const auto of_channels = [&](const std::array<double, 3>& values) {
    const auto scaled = at::tensor(at::ArrayRef<double>(values), at::TensorOptions(at::kFloat)) *
                        (1.0 / config.rescale_factor);
    return scaled.view({-1, 1, 1});
  };
  const auto normed = (image.pixels.to(at::kFloat) - of_channels(config.image_mean)) /
                      of_channels(config.image_std);
  const auto rows = image.grid.height;
  const auto columns = image.grid.width;
  const auto channels = normed.size(0);
  return normed.reshape({channels, rows / merge, merge, patch, columns / merge, merge, patch})
      .permute({1, 4, 2, 5, 0, 3, 6})
      .unsqueeze(5)
      .expand({-1, -1, -1, -1, -1, config.temporal_patch_size, -1, -1})
      .reshape({rows * columns, channels * config.temporal_patch_size * patch * patch});
}

}  // namespace ferry::rollout
