// The vision tower as prompts use it: loaded when the first image comes, run once for the images of
// a prompt, whose features are held while there is room: samples of one prompt, chunks of it, and
// answers to it that are trained on share them.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "models/vision/vision_model.h"
#include "rollout/vision/image_processor.h"
#include "rollout/vision/visual_prompt.h"

namespace ferry::rollout {

class VisionEncoder {
 public:
  using Load = std::function<std::unique_ptr<models::VisionModel>()>;
  // Tokens of images whose features are held, besides those of the prompt that was asked for last.
  static constexpr std::int64_t kCachedTokens = 8192;

  VisionEncoder(Load load, ImageProcessorConfig config, std::int64_t cached_tokens = kCachedTokens)
      : load_(std::move(load)), config_(config), cached_tokens_(cached_tokens) {}

  // Loads the tower, if it is not. Throws Error.
  void load();
  // Goes on with another tower, and forgets what the old one gave.
  void replace(std::unique_ptr<models::VisionModel> tower);
  // Features of all images of the prompt, one after another.
  models::ImageFeatures features(const VisualPrompt& prompt);

 private:
  struct Entry {
    PrefixHash digest{};
    models::ImageFeatures features{};
  };

  Load load_;
  ImageProcessorConfig config_;
  std::int64_t cached_tokens_;
  std::unique_ptr<models::VisionModel> tower_;
  std::list<Entry> cache_;  // the one that was asked for last is first
};

}  // namespace ferry::rollout
