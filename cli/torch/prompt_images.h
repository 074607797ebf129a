// The images of a prompt's messages: found, decoded, and counted into the text that the chat
// template makes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rollout/vision/image_processor.h"

namespace ferry::cli {

struct ImageReader {
  rollout::ImageProcessorConfig config{};
  std::string placeholder{};  // the text of the token that stands for a part of an image
};

// The images in the order of the messages' parts {"type": "image", "image": PATH}, each decoded and
// cut into patches. Throws Error(kUsage) for an address, and for parts of other kinds that are not
// text.
std::vector<rollout::ProcessedImage> read_images(const nlohmann::ordered_json& messages,
                                                 const ImageReader& reader);
// Whether there is a part of a message that is no text.
bool has_images(const nlohmann::ordered_json& messages);

// `text` with each placeholder as often as its image has tokens. Throws Error(kUsage) unless there
// are as many placeholders as images.
std::string expand_placeholders(const std::string& text,
                                const std::vector<rollout::ProcessedImage>& images,
                                const ImageReader& reader);

}  // namespace ferry::cli
