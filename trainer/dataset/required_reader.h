// The reader of images for data that have some.
#pragma once

#include <fmt/format.h>

#include <optional>
#include <string_view>

#include "distckpt/base/error.h"
#include "rollout/vision/prompt_images.h"

namespace ferry::trainer {

// Throws Error(kUsage) for a model that does not see. `subject`: "messages: have".
inline const rollout::ImageReader& required_reader(
    const std::optional<rollout::ImageReader>& reader, std::string_view subject) {
  if (!reader)
    throw Error(ErrorKind::kUsage,
                fmt::format("{} images, and the model's images are not computed", subject),
                "train a model that sees, with the files that say how it reads images, or name "
                "another column: data.image_key");
  return *reader;
}

}  // namespace ferry::trainer
