// The parts of messages' contents that are images. They are taken out of the messages, so that a
// chat template sees {"type": "image"} in the place of each, and say where their bytes are.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::rollout::text {

struct ImageSource {
  std::string place{};  // a path, perhaps after file://, or a data: URL; empty: there are bytes
  std::string bytes{};  // of the file

  std::string name() const;  // for messages
  // Reads the file, or decodes the URL. Throws Error(kUsage) for an address of the network and for
  // more bytes than `limit`, Error(kCorrupt) for a URL that holds no base64.
  std::string read(std::int64_t limit = std::int64_t{1} << 30) const;
  std::string url() const;  // the place, a path from the root, or a data: URL of the bytes
};

// The images in the order of the messages. A part is one if its type is "image", and names it as
// transformers' processors take it ("image", "path", "url" or "bytes"), or "image_url" (OpenAI's
// {"url": ...}). One that names nothing is the next of `column`, and so is each "<image>" in a
// content that is text (verl's column of images): paths, or objects with "bytes", "path" or
// "image". Members of parts that are null are left out. Throws Error(kCorrupt) for parts of other
// types, and unless the column has as many images as places.
std::vector<ImageSource> take_images(nlohmann::ordered_json& messages,
                                     const nlohmann::ordered_json& column = nullptr);

// True if there is a part of a message that is no text.
bool has_images(const nlohmann::ordered_json& messages);

}  // namespace ferry::rollout::text
