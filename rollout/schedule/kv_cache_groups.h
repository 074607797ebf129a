// Layers whose keys are kept equally long have the same blocks of the cache (vLLM's KV cache
// groups). A layer with a sliding window needs the last keys alone: where some layers have one,
// the layers are divided into groups of as many layers, those with all keys first, and a block
// holds tokens for the layers of one group, so that all groups share one set of blocks.
//
//   GPT-OSS, 24 layers, every other one windowed: 2 groups of 12
//   Gemma 3 1B, 26 layers, 4 with all keys:       1 group of 4 with all keys, 6 of 4 with windows,
//                                                 the last with 2 layers and room for 2 more
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "models/spec/transformer_config.h"

namespace ferry::rollout {

// The keys that a layer's query sees at most, its own among them; nothing: all.
using Window = std::optional<std::int64_t>;

struct KVCacheGroups {
  struct Place {
    std::int64_t group = 0;
    std::int64_t index = 0;  // in the group
  };
  std::vector<Window> windows{};      // of each group
  std::vector<Place> places{};        // of each layer
  std::int64_t layers_per_block = 0;  // that have keys

  bool has_windows() const;
};

KVCacheGroups kv_cache_groups(const models::TransformerConfig& config);

// The block that holds the first key which the row at `position` sees.
std::int64_t first_block(std::int64_t position, const Window& window, std::int64_t block_size);

// Blocks of all groups that a sequence of so many tokens has at a time, at most, if a step computes
// so many of it.
std::int64_t most_blocks(const std::vector<Window>& windows,
                         std::int64_t tokens,
                         std::int64_t step_tokens,
                         std::int64_t block_size);

}  // namespace ferry::rollout
