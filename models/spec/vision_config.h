// The vision tower of a model that also sees, in the names of its vision_config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::models {

struct VisionConfig {
  std::int64_t depth = 0;  // blocks
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_heads = 0;
  std::int64_t in_channels = 0;
  std::int64_t patch_size = 0;                           // pixels, in height and width
  std::int64_t temporal_patch_size = 0;                  // frames; an image counts as so many alike
  std::int64_t spatial_merge_size = 0;                   // patches of a token, in height and width
  std::int64_t out_hidden_size = 0;                      // of the language model
  std::int64_t num_position_embeddings = 0;              // of a square grid
  std::vector<std::int64_t> deepstack_visual_indexes{};  // blocks that the first layers also see
  double rotary_base = 10000.0;
  std::int64_t image_token_id = 0;  // in the place of each token of an image
  std::string problem{};            // the reason why the tower is not computed; empty: it is

  // Channels of a token's patches together.
  std::int64_t merged_size() const { return hidden_size * spatial_merge_size * spatial_merge_size; }
  bool operator==(const VisionConfig&) const = default;
};

}  // namespace ferry::models
