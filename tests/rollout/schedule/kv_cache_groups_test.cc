#include "rollout/schedule/kv_cache_groups.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ferry::rollout {
namespace kv_cache_groups_test {

// `full`: the layers that see all keys.
models::TransformerConfig config_of(std::int64_t num_layers,
                                    std::int64_t window,
                                    const std::vector<std::int64_t>& full) {
  models::TransformerConfig config;
  config.num_layers = num_layers;
  config.sliding_window = window;
  config.window_attn_skip_freq.assign(static_cast<std::size_t>(num_layers), true);
  for (const auto layer : full)
    config.window_attn_skip_freq[static_cast<std::size_t>(layer)] = false;
  return config;
}

TEST(KVCacheGroups, LayersWithoutWindowsAreOne) {
  models::TransformerConfig config;
  config.num_layers = 3;
  const auto groups = kv_cache_groups(config);
  EXPECT_EQ(groups.windows, std::vector<Window>{std::nullopt});
  EXPECT_EQ(groups.layers_per_block, 3);
  EXPECT_EQ(groups.places.at(2).index, 2);
  EXPECT_FALSE(groups.has_windows());
}

TEST(KVCacheGroups, LayersThatAllHaveAWindowAreOne) {
  models::TransformerConfig config;
  config.num_layers = 3;
  config.sliding_window = 100;
  const auto groups = kv_cache_groups(config);
  EXPECT_EQ(groups.windows, std::vector<Window>{100});
  EXPECT_EQ(groups.layers_per_block, 3);
}

TEST(KVCacheGroups, EveryOtherLayerMakesTwo) {
  const auto groups =
      kv_cache_groups(config_of(24, 128, {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23}));
  EXPECT_EQ(groups.windows, (std::vector<Window>{std::nullopt, 128}));
  EXPECT_EQ(groups.layers_per_block, 12);
  EXPECT_EQ(groups.places.at(22).group, 1);
  EXPECT_EQ(groups.places.at(22).index, 11);
  EXPECT_EQ(groups.places.at(23).group, 0);
}

// The header's example: each place is taken once.
TEST(KVCacheGroups, FewerLayersOfAKindSetTheirSize) {
  const auto groups = kv_cache_groups(config_of(26, 512, {5, 11, 17, 23}));
  EXPECT_EQ(groups.windows.size(), 7U);
  EXPECT_EQ(groups.windows.front(), std::nullopt);
  EXPECT_EQ(groups.windows.back(), 512);
  EXPECT_EQ(groups.layers_per_block, 4);
  std::vector<int> taken(28);
  for (const auto& place : groups.places)
    ++taken.at(static_cast<std::size_t>(4 * place.group + place.index));
  EXPECT_EQ(std::vector<int>(taken.begin(), taken.begin() + 26), std::vector<int>(26, 1));
  EXPECT_EQ(taken[26] + taken[27], 0);
}

TEST(KVCacheGroups, FewWindowsSetTheirSizeToo) {
  const auto groups = kv_cache_groups(config_of(5, 10, {0, 1, 3, 4}));
  EXPECT_EQ(groups.windows,
            (std::vector<Window>{std::nullopt, std::nullopt, std::nullopt, std::nullopt, 10}));
  EXPECT_EQ(groups.layers_per_block, 1);
  EXPECT_EQ(groups.places.at(2).group, 4);
}

TEST(KVCacheGroups, KnowsTheFirstBlockThatARowSees) {
  EXPECT_EQ(first_block(1000, std::nullopt, 4), 0);
  EXPECT_EQ(first_block(5, 6, 4), 0);
  EXPECT_EQ(first_block(8, 6, 4), 0);  // from 3 on
  EXPECT_EQ(first_block(9, 6, 4), 1);
  EXPECT_EQ(first_block(9, 1, 4), 2);
}

TEST(KVCacheGroups, CountsTheMostBlocksOfASequence) {
  EXPECT_EQ(most_blocks({std::nullopt}, 9, 1, 4), 3);
  EXPECT_EQ(most_blocks({std::nullopt, 6}, 100, 1, 4), 25 + 3);   // 6 keys
  EXPECT_EQ(most_blocks({std::nullopt, 6}, 100, 20, 4), 25 + 8);  // 25 keys
  EXPECT_EQ(most_blocks({6}, 5, 100, 4), 2);
}

}  // namespace kv_cache_groups_test
}  // namespace ferry::rollout
