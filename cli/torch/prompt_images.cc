#include "cli/torch/prompt_images.h"

#include <functional>
#include <span>

#include "distckpt/base/error.h"
#include "distckpt/storage/source_files.h"
#include "rollout/vision/image_file.h"

namespace ferry::cli {
namespace {

using nlohmann::ordered_json;

// The type of a part; empty where it has none.
std::string type_of(const ordered_json& part) {
  const auto type = part.find("type");
  return type != part.end() && type->is_string() ? type->get<std::string>() : std::string();
}

bool is_text(const ordered_json& part) {
  const auto type = type_of(part);
  return type == "text" || (type.empty() && part.contains("text"));
}

// Takes each part that is no text.
void each_part(const ordered_json& messages, const std::function<void(const ordered_json&)>& take) {
  if (!messages.is_array()) return;
  for (const auto& message : messages) {
    if (!message.is_object()) continue;
    const auto content = message.find("content");
    if (content == message.end() || !content->is_array()) continue;
    for (const auto& part : *content) {
      if (part.is_object() && !is_text(part)) take(part);
    }
  }
}

std::string path_of(const ordered_json& part) {
  const auto type = type_of(part);
  require(type == "image", ErrorKind::kUsage,
          "messages: a part of type \"{}\" is not read, only text and image are", type);
  for (const auto* key : {"image", "path"}) {
    const auto found = part.find(key);
    if (found == part.end()) continue;
    require(found->is_string(), ErrorKind::kUsage, "messages: {} is {}, not a path", key,
            found->dump());
    auto path = found->get<std::string>();
    require(
        !path.starts_with("http://") && !path.starts_with("https://") && !path.starts_with("data:"),
        ErrorKind::kUsage, "messages: {} is an address, only files are read", path.substr(0, 80));
    return path;
  }
  fail(ErrorKind::kUsage, "messages: an image has neither image nor path");
}

}  // namespace

bool has_images(const ordered_json& messages) {
  bool found = false;
  each_part(messages, [&](const ordered_json&) { found = true; });
  return found;
}

std::vector<rollout::ProcessedImage> read_images(const ordered_json& messages,
                                                 const ImageReader& reader) {
  std::vector<rollout::ProcessedImage> images;
  each_part(messages, [&](const ordered_json& part) {
    const auto path = path_of(part);
    const auto bytes = distckpt::read_text(path);
    const auto image = rollout::decode_image(std::as_bytes(std::span(bytes)), path);
    images.push_back(with_context([&] { return "reading " + path; },
                                  [&] { return rollout::process_image(image, reader.config); }));
  });
  return images;
}

std::string expand_placeholders(const std::string& text,
                                const std::vector<rollout::ProcessedImage>& images,
                                const ImageReader& reader) {
  std::string expanded;
  std::size_t from = 0;
  std::size_t count = 0;
  while (true) {
    const auto at = text.find(reader.placeholder, from);
    expanded += text.substr(from, at - from);
    if (at == std::string::npos) break;
    if (count < images.size()) {
      const auto tokens =
          images[count].grid.num_patches() / (reader.config.merge_size * reader.config.merge_size);
      for (std::int64_t i = 0; i < tokens; ++i) expanded += reader.placeholder;
    }
    ++count;
    from = at + reader.placeholder.size();
  }
  require(count == images.size(), ErrorKind::kUsage,
          "the chat template writes {} {}, and the messages have {} images", count,
          reader.placeholder, images.size());
  return expanded;
}

}  // namespace ferry::cli
