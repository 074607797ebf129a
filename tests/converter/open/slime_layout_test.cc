#include "converter/open/slime_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "converter/open/checkpoint.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace slime_layout_test {

using support::fails;

// Qwen3-Next: layers of gated delta nets, and some of gated attention.
class SlimeLayout : public testing::Test {
 protected:
  const MegatronTensor* find(const ModelMap& map, std::string_view key) const {
    const auto at = std::ranges::find(map.megatron, key, &MegatronTensor::key);
    return at == map.megatron.end() ? nullptr : &*at;
  }
  std::int64_t layer_with_delta_net(bool wanted) const {
    std::int64_t layer = 0;
    while (map_.config.is_linear_attention_layer(layer) != wanted) ++layer;
    return layer;
  }

  ModelMap map_ = open(support::test_data("hf_qwen3_next") / "hf").map;
};

TEST_F(SlimeLayout, IsKnownByTheNamesOfItsDeltaNets) {
  EXPECT_TRUE(
      is_slime_layout({{"decoder.layers.0.self_attention.linear_attn.A_log", distckpt::Shape{2}}}));
  EXPECT_FALSE(is_slime_layout({{"decoder.layers.0.self_attention.A_log", distckpt::Shape{2}}}));
}

TEST_F(SlimeLayout, IsNotKnownByTheOptimizersNames) {
  EXPECT_FALSE(
      is_slime_layout({{"optimizer.state.exp_avg.decoder.layers.0.self_attention.linear_attn.A_log",
                        distckpt::Shape{2}}}));
}

TEST_F(SlimeLayout, HasEachTensorOfADeltaNetWhole) {
  const auto slime = in_slime_layout(map_);
  const auto key = fmt::format("decoder.layers.{}.self_attention.linear_attn.in_proj_qkvz.weight",
                               layer_with_delta_net(true));
  const auto* tensor = find(slime, key);
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(find(map_, key), nullptr);
  ASSERT_EQ(tensor->parts.size(), 1U);
  EXPECT_EQ(tensor->shape, map_.tensors[tensor->parts[0].model].shape);
  EXPECT_EQ(tensor->split, Split::kNone);
  EXPECT_TRUE(tensor->stacked_key.empty());
}

TEST_F(SlimeLayout, LeavesAttentionAsItIs) {
  const auto key = fmt::format("decoder.layers.{}.self_attention.linear_qkv.weight",
                               layer_with_delta_net(false));
  const auto* tensor = find(in_slime_layout(map_), key);
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->shape, find(map_, key)->shape);
}

TEST_F(SlimeLayout, HoldsEveryTensorOfTheModelOnce) {
  std::vector<int> times(map_.tensors.size());
  for (const auto& tensor : in_slime_layout(map_).megatron) {
    const auto layer = tensor.layer.value_or(layer_with_delta_net(false));
    if (!map_.config.is_linear_attention_layer(layer)) continue;
    for (const auto& part : tensor.parts) ++times[part.model];
  }
  for (std::size_t i = 0; i < times.size(); ++i) {
    const auto& name = map_.tensors[i].name;
    if (name.find(".linear_attn.") == std::string::npos || name.starts_with("mtp")) continue;
    EXPECT_EQ(times[i], 1) << name;
  }
}

TEST_F(SlimeLayout, IsOfModelsWithDeltaNetsAlone) {
  const auto llama = open(support::test_data("hf_llama") / "hf").map;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--megatron-layout slime", "llama"},
                    [&] { in_slime_layout(llama); }));
}

TEST_F(SlimeLayout, TakesTheOlderNameOfGatedAttentionWhereItIsStored) {
  const auto layer = layer_with_delta_net(false);
  const auto prefix = fmt::format("decoder.layers.{}.self_attention.", layer);
  const auto shape = find(map_, prefix + "linear_qkv.weight")->shape;
  use_gated_names({{"module." + prefix + "linear_qgkv.weight", shape}}, map_);
  EXPECT_EQ(find(map_, prefix + "linear_qkv.weight"), nullptr);
  ASSERT_NE(find(map_, prefix + "linear_qgkv.weight"), nullptr);
  EXPECT_TRUE(find(map_, prefix + "linear_qgkv.weight")->stacked_key.empty());
}

TEST_F(SlimeLayout, KeepsTheNewerNameElsewhere) {
  const auto before = map_.megatron.size();
  use_gated_names({{"decoder.final_layernorm.weight", distckpt::Shape{2}}}, map_);
  EXPECT_EQ(map_.megatron.size(), before);
  EXPECT_TRUE(std::ranges::none_of(map_.megatron, [](const MegatronTensor& tensor) {
    return tensor.key.find("qgkv") != std::string::npos;
  }));
}

}  // namespace slime_layout_test
}  // namespace ferry::converter
