// The vision tower as prompts use it: loaded when the first image comes, or a part of the model,
// run once for the images of a prompt, whose features are held while there is room: samples of one
// prompt, chunks of it, and answers to it that are trained on share them.
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
  using Tower = std::shared_ptr<const models::VisionModel>;
  using Load = std::function<Tower()>;
  // Tokens of images whose features are held, besides those of the prompt that was asked for last.
  static constexpr std::int64_t kCachedTokens = 8192;

  VisionEncoder(Load load, ImageProcessorConfig config, std::int64_t cached_tokens = kCachedTokens)
      : load_(std::move(load)), config_(config), cached_tokens_(cached_tokens) {}

  // Loads the tower, if it is not. Throws Error.
  void load();
  // Goes on with another tower, and forgets what the old one gave.
  void replace(Tower tower);
  // Forgets the features that are held: the tower has got other weights, or their gradients go.
  void forget() { cache_.clear(); }
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
  Tower tower_;
  std::list<Entry> cache_;  // the one that was asked for last is first
};

// A tower that a model owns, which outlives its encoder.
inline VisionEncoder::Tower part_of_model(const models::VisionModel* tower) {
  return {VisionEncoder::Tower(), tower};
}

}  // namespace ferry::rollout
