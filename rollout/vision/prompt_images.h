// The images of a prompt, from their files to the text that stands for them: decoded, resized, and
// counted into what the chat template makes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/spec/transformer_config.h"
#include "rollout/text/content_parts.h"
#include "rollout/text/tokenizer/model_files.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "rollout/vision/image_file.h"
#include "rollout/vision/image_processor.h"

namespace ferry::rollout {

struct ImageReader {
  ImageProcessorConfig config{};
  std::string placeholder{};  // the text of the token that stands for a part of an image
  std::int64_t most_pixels = kMostPixels;  // of a file
};

// Nothing if the model has no tower that is computed, or its files do not say how images are read.
// Throws Error(kLayout) if they say it otherwise than its configuration.
std::optional<ImageReader> find_image_reader(const text::ModelFiles& files,
                                             const models::TransformerConfig& config,
                                             const text::Tokenizer& tokenizer);

// Each decoded and resized. Throws Error that names the image.
std::vector<ProcessedImage> read_images(std::span<const text::ImageSource> sources,
                                        const ImageReader& reader);

// The placeholders of `text`, each as often as its image has tokens. Images are given in the order
// of the text, which may be cut: `next` is the first one of this text, and then of the next.
std::string expand_placeholders(const std::string& text,
                                std::span<const ProcessedImage> images,
                                const ImageReader& reader,
                                std::size_t& next);
// The same of a whole text. Throws Error(kUsage) unless there are as many placeholders as images.
std::string expand_placeholders(const std::string& text,
                                std::span<const ProcessedImage> images,
                                const ImageReader& reader);
// Throws Error(kUsage) unless `found` placeholders are as many as the images.
void require_all_placed(std::size_t found, std::size_t images, const ImageReader& reader);

}  // namespace ferry::rollout
