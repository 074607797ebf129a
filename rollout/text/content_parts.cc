#include "rollout/text/content_parts.h"

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kPlaceholder = "<image>";
constexpr std::string_view kData = "data:";
constexpr std::string_view kFile = "file://";
constexpr std::size_t kMostOfName = 80;  // of an address that holds an image

std::string part_type(const ordered_json& part) {
  const auto type = part.find("type");
  return type != part.end() && type->is_string() ? type->get<std::string>() : std::string();
}

bool is_text_part(const ordered_json& part) {
  const auto type = part_type(part);
  return type == "text" || (type.empty() && part.contains("text"));
}

const ordered_json* member_of(const ordered_json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

ImageSource source_of(const ordered_json& value) {
  ImageSource source;
  if (value.is_binary()) {
    const auto& bytes = value.get_binary();
    source.bytes.assign(bytes.begin(), bytes.end());
    require(!source.bytes.empty(), ErrorKind::kCorrupt, "an image has no bytes");
    return source;
  }
  if (value.is_string()) {
    source.place = value.get<std::string>();
    require(!source.place.empty(), ErrorKind::kCorrupt, "an image is named by an empty text");
    return source;
  }
  require(value.is_object(), ErrorKind::kCorrupt, "an image is a JSON {}, not a path",
          value.type_name());
  for (const auto* key : {"min_pixels", "max_pixels", "resized_height", "resized_width"})
    require(member_of(value, key) == nullptr, ErrorKind::kCorrupt,
            "an image has {}: its size is the processor's", key);
  for (const auto* key : {"bytes", "image", "path", "url"}) {
    if (const auto* const found = member_of(value, key)) return source_of(*found);
  }
  fail(ErrorKind::kCorrupt, "an image has neither image nor path");
}

bool names_nothing(const ordered_json& part) {
  for (const auto* key : {"bytes", "image", "path", "url", "image_url"}) {
    if (member_of(part, key) != nullptr) return false;
  }
  return true;
}

ordered_json image_part() {
  return {{"type", "image"}};
}

class ImageTaker {
 public:
  explicit ImageTaker(const ordered_json& column) : column_(column) {
    require(column.is_null() || column.is_array(), ErrorKind::kCorrupt,
            "images: is a JSON {}, not a list", column.type_name());
  }

  std::vector<ImageSource> take(ordered_json& messages) {
    if (messages.is_array()) {
      for (auto& message : messages) {
        if (!message.is_object()) continue;
        const auto content = message.find("content");
        if (content == message.end()) continue;
        if (content->is_array()) take_parts(*content);
        if (content->is_string() && !column_.empty()) split(*content);
      }
    }
    require(next_ == column_.size(), ErrorKind::kCorrupt,
            "images: there are {}, and the messages have places for {}", column_.size(), next_);
    return std::move(images_);
  }

 private:
  void take_next() {
    require(next_ < column_.size(), ErrorKind::kCorrupt,
            "an image has neither image nor path, and the column of images has only {}",
            column_.size());
    images_.push_back(source_of(column_[next_++]));
  }

  void take_parts(ordered_json& parts) {
    for (auto& part : parts) {
      if (!part.is_object()) continue;
      ordered_json kept = ordered_json::object();
      for (const auto& [key, value] : part.items()) {
        if (!value.is_null()) kept[key] = value;
      }
      part = std::move(kept);
      if (is_text_part(part)) continue;
      const auto type = part_type(part);
      require(type == "image" || type == "image_url", ErrorKind::kCorrupt,
              "messages: a part of type \"{}\" is not read, only text and image are", type);
      const auto* const url = member_of(part, "image_url");
      if (names_nothing(part))
        take_next();
      else
        images_.push_back(source_of(url != nullptr ? *url : part));
      part = image_part();
    }
  }

  void split(ordered_json& content) {
    const auto text = content.get<std::string>();
    auto parts = ordered_json::array();
    const auto add_text = [&](std::string_view some) {
      if (!some.empty()) parts.push_back({{"type", "text"}, {"text", some}});
    };
    std::size_t from = 0;
    while (true) {
      const auto at = text.find(kPlaceholder, from);
      add_text(std::string_view(text).substr(from, at == text.npos ? at : at - from));
      if (at == text.npos) break;
      take_next();
      parts.push_back(image_part());
      from = at + kPlaceholder.size();
    }
    content = std::move(parts);
  }

  const ordered_json& column_;
  std::size_t next_ = 0;
  std::vector<ImageSource> images_;
};

}  // namespace

std::string ImageSource::name() const {
  if (place.empty()) return "an image";
  if (!place.starts_with(kData) || place.size() <= kMostOfName) return place;
  return place.substr(0, kMostOfName) + "...";  // the rest is the image itself
}

std::string ImageSource::read(std::int64_t limit) const {
  const auto require_small = [&](std::size_t size) {
    require(static_cast<std::int64_t>(size) <= limit, ErrorKind::kUsage,
            "{}: has {} bytes, more than {}", name(), size, limit);
  };
  if (place.empty()) {
    require_small(bytes.size());
    return bytes;
  }
  if (place.starts_with(kData)) {
    constexpr std::string_view kBase64 = ";base64,";
    const auto comma = place.find(',');
    const auto header = comma == place.npos ? 0 : comma + 1;
    require(std::string_view(place).substr(0, header).ends_with(kBase64), ErrorKind::kCorrupt,
            "{}: is not data:image/...;base64,...", name());
    require_small((place.size() - header) / 4 * 3);
    auto decoded = base64_bytes(std::string_view(place).substr(header));
    require(decoded.has_value(), ErrorKind::kCorrupt, "{}: is not base64", name());
    return *std::move(decoded);
  }
  require(!place.starts_with("http://") && !place.starts_with("https://"), ErrorKind::kUsage,
          "{}: is an address, only files are read", name());
  return distckpt::read_text(
      std::string(place.starts_with(kFile) ? place.substr(kFile.size()) : place), limit);
}

std::string ImageSource::url() const {
  if (place.empty()) return "data:;base64," + base64_text(distckpt::as_bytes(bytes));
  const bool is_path = !place.starts_with(kData) && place.find("://") == std::string::npos;
  return is_path ? std::filesystem::absolute(place).string() : place;
}

std::vector<ImageSource> take_images(ordered_json& messages, const ordered_json& column) {
  return ImageTaker(column).take(messages);
}

bool has_images(const ordered_json& messages) {
  if (!messages.is_array()) return false;
  for (const auto& message : messages) {
    if (!message.is_object()) continue;
    const auto content = message.find("content");
    if (content == message.end() || !content->is_array()) continue;
    for (const auto& part : *content) {
      if (part.is_object() && !is_text_part(part)) return true;
    }
  }
  return false;
}

}  // namespace ferry::rollout::text
