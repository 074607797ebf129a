#include "rollout/schedule/kv_cache_groups.h"

#include <algorithm>

#include "distckpt/base/integers.h"

namespace ferry::rollout {

bool KVCacheGroups::has_windows() const {
  return std::ranges::any_of(windows, [](const Window& window) { return window.has_value(); });
}

KVCacheGroups kv_cache_groups(const models::TransformerConfig& config) {
  KVCacheGroups groups;
  std::int64_t num_windowed = 0;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    num_windowed += config.window_of(layer) ? 1 : 0;
  const auto num_full = config.num_layers - num_windowed;
  if (num_windowed == 0 || num_full == 0 || config.has_linear_attention()) {
    const bool all_windowed = num_full == 0 && !config.has_linear_attention();
    groups.windows = {all_windowed ? config.sliding_window : std::nullopt};
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
      groups.places.push_back({.group = 0, .index = layer});
    groups.layers_per_block = config.num_key_value_layers();
    return groups;
  }
  const auto size = std::min(num_full, num_windowed);
  groups.layers_per_block = size;
  groups.windows.assign(static_cast<std::size_t>(distckpt::ceil_div(num_full, size)), std::nullopt);
  const auto first_windowed = static_cast<std::int64_t>(groups.windows.size());
  for (std::int64_t i = 0; i < distckpt::ceil_div(num_windowed, size); ++i)
    groups.windows.push_back(config.sliding_window);
  std::int64_t full = 0, windowed = 0;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool has_window = config.window_of(layer).has_value();
    const auto number = has_window ? windowed++ : full++;
    groups.places.push_back(
        {.group = (has_window ? first_windowed : 0) + number / size, .index = number % size});
  }
  return groups;
}

std::int64_t first_block(std::int64_t position, const Window& window, std::int64_t block_size) {
  return window ? std::max<std::int64_t>(position - *window + 1, 0) / block_size : 0;
}

// The rows of a step and the keys behind them may begin and end in the midst of a block.
std::int64_t most_blocks(const std::vector<Window>& windows,
                         std::int64_t tokens,
                         std::int64_t step_tokens,
                         std::int64_t block_size) {
  const auto all = distckpt::ceil_div(tokens, block_size);
  std::int64_t blocks = 0;
  for (const auto& window : windows)
    blocks += window ? std::min(all, distckpt::ceil_div(*window - 1 + std::min(step_tokens, tokens),
                                                        block_size) +
                                         1)
                     : all;
  return blocks;
}

}  // namespace ferry::rollout
