#include "rollout/vision/vision_encoder.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace ferry::rollout {

void VisionEncoder::load() {
  if (!tower_) tower_ = load_();
}

void VisionEncoder::replace(Tower tower) {
  tower_ = std::move(tower);
  forget();
}

models::ImageFeatures VisionEncoder::features(const VisualPrompt& prompt) {
  const auto found = std::ranges::find(cache_, prompt.digest, &Entry::digest);
  if (found != cache_.end()) {
    cache_.splice(cache_.begin(), cache_, found);
    return cache_.front().features;
  }
  load();
  std::vector<at::Tensor> pixels;
  std::vector<models::ImageGrid> grids;
  for (const auto& image : prompt.images) {
    pixels.push_back(pixel_values(image, config_));
    grids.push_back(image.grid);
  }
  cache_.push_front({.digest = prompt.digest, .features = tower_->forward(at::cat(pixels), grids)});
  auto held = cached_tokens_;
  auto entry = std::next(cache_.begin());
  while (entry != cache_.end() && (held -= entry->features.embeddings.size(0)) >= 0) ++entry;
  cache_.erase(entry, cache_.end());
  return cache_.front().features;
}

}  // namespace ferry::rollout
