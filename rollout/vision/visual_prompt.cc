#include "rollout/vision/visual_prompt.h"

#define XXH_INLINE_ALL
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <xxhash.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "rollout/vision/vision_encoder.h"

namespace ferry::rollout {
namespace {

PrefixHash digest_of(std::span<const ProcessedImage> images) {
  PrefixHash digest;
  for (const auto& image : images) {
    const auto of_pixels = XXH3_128bits_withSeed(
        image.pixels.const_data_ptr(), static_cast<std::size_t>(image.pixels.nbytes()), digest.low);
    const auto of_grid = XXH3_128bits_withSeed(&image.grid, sizeof image.grid, of_pixels.low64);
    digest = {.low = of_grid.low64, .high = digest.high ^ of_grid.high64 ^ of_pixels.high64};
  }
  return digest;
}

// Walks the prompt: text goes on by one, an image takes a square that its longer side fills.
void place(std::span<const std::int64_t> prompt,
           std::span<const ProcessedImage> images,
           const models::VisionConfig& config,
           VisualPrompt& visual) {
  const auto put = [&](std::int64_t time, std::int64_t height, std::int64_t width) {
    visual.positions[0].push_back(time);
    visual.positions[1].push_back(height);
    visual.positions[2].push_back(width);
  };
  std::int64_t next = 0;
  std::size_t image = 0;
  const auto count = static_cast<std::int64_t>(prompt.size());
  for (std::int64_t i = 0; i < count;) {
    if (prompt[static_cast<std::size_t>(i)] != config.image_token_id) {
      put(next, next, next);
      ++next;
      ++i;
      continue;
    }
    std::int64_t end = i;
    while (end < count && prompt[static_cast<std::size_t>(end)] == config.image_token_id) ++end;
    require(image < images.size(), ErrorKind::kUsage,
            "the prompt has tokens of {} images or more, expected {}", image + 1, images.size());
    const auto& grid = images[image++].grid;
    const auto rows = grid.height / config.spatial_merge_size;
    const auto columns = grid.width / config.spatial_merge_size;
    require(end - i == grid.frames * rows * columns, ErrorKind::kUsage,
            "image {} has {} tokens in the prompt, expected {}", image, end - i,
            grid.frames * rows * columns);
    for (; i < end; ++i) {
      const auto in_frame = (i - (end - grid.frames * rows * columns)) % (rows * columns);
      const auto frame = (i - (end - grid.frames * rows * columns)) / (rows * columns);
      visual.tokens.push_back(i);
      put(next + frame, next + in_frame / columns, next + in_frame % columns);
    }
    next += std::max(grid.height, grid.width) / config.spatial_merge_size;
  }
  require(image == images.size(), ErrorKind::kUsage,
          "the prompt has tokens of {} images, not of {}", image, images.size());
  visual.position_delta = next - count;
}

}  // namespace

at::Tensor VisualPrompt::positions_of(std::int64_t count) const {
  auto result = at::empty({static_cast<std::int64_t>(positions.size()), count}, at::kLong);
  auto* next = result.mutable_data_ptr<std::int64_t>();
  for (std::size_t axis = 0; axis < positions.size(); ++axis) {
    for (std::int64_t token = 0; token < count; ++token) *next++ = position(axis, token);
  }
  return result;
}

std::shared_ptr<const VisualPrompt> make_visual_prompt(const models::VisionConfig& config,
                                                       std::span<const std::int64_t> prompt,
                                                       std::vector<ProcessedImage> images) {
  auto visual = std::make_shared<VisualPrompt>();
  place(prompt, images, config, *visual);
  visual->digest = digest_of(images);
  visual->images = std::move(images);
  return visual;
}

void VisualStep::add(const VisualPrompt& prompt,
                     VisionEncoder& encoder,
                     std::int64_t begin,
                     std::int64_t count,
                     std::int64_t row) {
  const auto first = std::ranges::lower_bound(prompt.tokens, begin);
  const auto last = std::lower_bound(first, prompt.tokens.end(), begin + count);
  if (first == last) return;
  for (auto token = first; token != last; ++token) rows_.push_back(row + *token - begin);
  const auto features = encoder.features(prompt);
  const auto part = [&](const at::Tensor& of_all) {
    return of_all.narrow(0, first - prompt.tokens.begin(), last - first);
  };
  embeddings_.push_back(part(features.embeddings));
  deepstack_.resize(features.deepstack.size());
  for (std::size_t i = 0; i < deepstack_.size(); ++i)
    deepstack_[i].push_back(part(features.deepstack[i]));
}

models::VisualRows VisualStep::rows() const {
  if (rows_.empty()) return {};
  const auto embeddings = at::cat(embeddings_);
  models::VisualRows rows{.rows = at::tensor(rows_, at::kLong).to(embeddings.device()),
                          .embeddings = embeddings};
  for (const auto& of_layer : deepstack_) rows.deepstack.push_back(at::cat(of_layer));
  return rows;
}

}  // namespace ferry::rollout
