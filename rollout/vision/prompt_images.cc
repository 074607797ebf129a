#include "rollout/vision/prompt_images.h"

#include "distckpt/base/error.h"

namespace ferry::rollout {

std::optional<ImageReader> find_image_reader(const text::ModelFiles& files,
                                             const models::TransformerConfig& config,
                                             const text::Tokenizer& tokenizer) {
  if (!config.vision) return std::nullopt;
  const auto& vision = *config.vision;
  for (const auto* name : {"processor_config.json", "preprocessor_config.json"}) {
    const auto text = files.read(name);
    if (!text || !describes_images(*text, name)) continue;
    const auto source = fmt::format("{}: {}", files.source(), name);
    const auto token = static_cast<text::TokenId>(vision.image_token_id);
    ImageReader reader{.config = parse_image_processor(*text, source),
                       .placeholder = tokenizer.id_to_token(token).value_or("")};
    require(reader.config.patch_size == vision.patch_size &&
                reader.config.temporal_patch_size == vision.temporal_patch_size &&
                reader.config.merge_size == vision.spatial_merge_size,
            ErrorKind::kLayout, "{}: cuts other patches than the model's vision_config says",
            source);
    require(!reader.placeholder.empty(), ErrorKind::kLayout,
            "{}: the tokenizer has no token {}, image_token_id of config.json", files.source(),
            vision.image_token_id);
    return reader;
  }
  return std::nullopt;
}

std::vector<ProcessedImage> read_images(std::span<const text::ImageSource> sources,
                                        const ImageReader& reader) {
  std::vector<ProcessedImage> images;
  for (const auto& source : sources) {
    const auto bytes = source.read();
    const auto image =
        decode_image(std::as_bytes(std::span(bytes)), source.name(), reader.most_pixels);
    images.push_back(with_context([&] { return "reading " + source.name(); },
                                  [&] { return process_image(image, reader.config); }));
  }
  return images;
}

std::string expand_placeholders(const std::string& text,
                                std::span<const ProcessedImage> images,
                                const ImageReader& reader,
                                std::size_t& next) {
  std::string expanded;
  std::size_t from = 0;
  while (true) {
    const auto at = text.find(reader.placeholder, from);
    expanded += text.substr(from, at - from);
    if (at == std::string::npos) break;
    if (next < images.size()) {
      const auto tokens =
          images[next].grid.num_patches() / (reader.config.merge_size * reader.config.merge_size);
      for (std::int64_t i = 0; i < tokens; ++i) expanded += reader.placeholder;
    }
    ++next;
    from = at + reader.placeholder.size();
  }
  return expanded;
}

std::string expand_placeholders(const std::string& text,
                                std::span<const ProcessedImage> images,
                                const ImageReader& reader) {
  std::size_t count = 0;
  auto expanded = expand_placeholders(text, images, reader, count);
  require_all_placed(count, images.size(), reader);
  return expanded;
}

void require_all_placed(std::size_t found, std::size_t images, const ImageReader& reader) {
  require(found == images, ErrorKind::kUsage,
          "the chat template writes {} {}, and the messages have {} images", found,
          reader.placeholder, images);
}

}  // namespace ferry::rollout
