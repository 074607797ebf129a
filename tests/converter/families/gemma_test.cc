// Gemma 4: layers of two sizes of attention, stacked by their kind, and values that are keys.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/families/model_map.h"
#include "distckpt/plan/coverage.h"

namespace ferry::converter {
namespace gemma_test {

using distckpt::Box;

models::TransformerConfig gemma4() {
  models::TransformerConfig config{.family = "gemma4_text",
                                   .num_layers = 5,
                                   .hidden_size = 3,
                                   .ffn_hidden_size = 4,
                                   .num_attention_heads = 4,
                                   .num_query_groups = 2,
                                   .kv_channels = 2,
                                   .vocab_size = 7};
  config.sliding_window = 4;
  config.window_attn_skip_freq = {true, false, true, true, false};
  config.global_kv_channels = 6;
  config.num_global_query_groups = 1;
  config.attention_k_eq_v = true;
  config.per_layer_embed_dim = 2;
  config.per_layer_embed_vocab_size = 5;
  config.qk_layernorm = true;
  config.post_norm = models::PostNorm::kOfLayer;
  config.untie_embeddings_and_output_weights = false;
  return config;
}

// Its tensors as Megatron-Bridge keeps them.
distckpt::Layout stored(const ModelMap& map) {
  distckpt::Layout layout;
  for (const auto& tensor : map.megatron) {
    const auto& key = map.written_key(tensor);
    auto shape = tensor.shape;
    if (key == tensor.stacked_key) shape.push_front(tensor.stack_size);
    if (!layout.find(key)) layout.add_tensor({.name = key, .shape = shape});
  }
  return layout;
}

TEST(Gemma4, StacksLayersByTheKindOfTheirAttention) {
  const auto layout = stored(make_model_map(gemma4()));
  const auto shape = [&](const std::string& below) {
    return to_string(layout.tensor(*layout.find("decoder.layers." + below)).shape);
  };
  EXPECT_EQ(shape("self_attention_sliding.linear_qkv.weight"), "[3, 16, 3]");
  EXPECT_EQ(shape("self_attention_global.linear_qkv.weight"), "[2, 36, 3]");
  EXPECT_EQ(shape("self_attention_global.k_layernorm.weight"), "[2, 6]");
  EXPECT_EQ(shape("self_attention_global.linear_proj.weight"), "[2, 3, 24]");
  EXPECT_EQ(shape("layer_scalar"), "[5, 1]");
  EXPECT_EQ(shape("per_layer_projection.weight"), "[5, 3, 2]");
}

// Keys are copied to the values of a target; those of a source, which nothing computes with, are
// left out. Either way each stored element has one part.
TEST(Gemma4, WritesValuesThatAreKeysAndDoesNotReadThem) {
  const auto map = make_model_map(gemma4());
  const auto layout = stored(map);
  const auto qkv = *layout.find("decoder.layers.self_attention_global.linear_qkv.weight");
  for (const auto side : {LinkedSide::kSource, LinkedSide::kTarget}) {
    const auto links = link_megatron(map, layout, side);
    std::vector<std::vector<Box>> used(layout.tensors().size());
    for (const auto& link : links.links) used[link.stored].push_back(link.stored_box);
    for (const auto& box : links.left_out) used[box.stored].push_back(box.box);
    for (std::uint32_t i = 0; i < used.size(); ++i) {
      const auto& tensor = layout.tensor(i);
      EXPECT_NO_THROW(distckpt::require_exactly_once(tensor.name, tensor.shape, used[i], "linked"));
    }
    std::int64_t copies = 0;
    for (const auto& link : links.links) {
      if (link.copy == 0) continue;
      EXPECT_EQ(link.stored, qkv);
      EXPECT_EQ(map.tensors[link.model].name.substr(15), "self_attn.k_proj.weight");
      EXPECT_EQ(link.stored_box.offset[1], 30) << "values lie behind queries and keys";
      copies += link.stored_box.size[1];
    }
    EXPECT_EQ(copies, side == LinkedSide::kTarget ? 2 * 6 : 0);
    EXPECT_EQ(std::ssize(links.left_out), side == LinkedSide::kTarget ? 0 : 2);
  }
}

// E2B: its last two layers take keys and values of those before them.
models::TransformerConfig shared() {
  auto config = gemma4();
  config.attention_k_eq_v = false;
  config.num_kv_shared_layers = 2;
  config.use_double_wide_mlp = true;
  return config;
}

TEST(Gemma4, StacksNoLayersWhereTheLastAreWider) {
  const auto layout = stored(make_model_map(shared()));
  const auto shape = [&](const std::string& below) {
    return to_string(layout.tensor(*layout.find("decoder.layers." + below)).shape);
  };
  EXPECT_EQ(shape("2.mlp.linear_fc1.weight"), "[8, 3]");
  EXPECT_EQ(shape("3.mlp.linear_fc1.weight"), "[16, 3]");
  EXPECT_EQ(shape("4.mlp.linear_fc2.weight"), "[3, 8]");
  EXPECT_EQ(shape("4.self_attention_global.linear_qkv.weight"), "[36, 3]");
}

// Queries alone are of the model; each other element is filled once.
TEST(Gemma4, FillsKeysAndValuesThatNothingComputesWith) {
  const auto map = make_model_map(shared());
  EXPECT_FALSE(map.index.contains("model.layers.3.self_attn.k_proj.weight"));
  EXPECT_FALSE(map.index.contains("model.layers.4.self_attn.k_norm.weight"));
  EXPECT_TRUE(map.index.contains("model.layers.2.self_attn.k_norm.weight"));
  const auto layout = stored(map);
  const auto links = link_megatron(map, layout);
  std::vector<std::vector<Box>> used(layout.tensors().size());
  for (const auto& link : links.links) used[link.stored].push_back(link.stored_box);
  std::string filled;
  for (const auto& padding : links.padding) {
    used[padding.stored].push_back(padding.box);
    filled += fmt::format("{} {}{}\n", layout.tensor(padding.stored).name.substr(15),
                          to_string(padding.box), padding.ones ? " ones" : "");
  }
  for (std::uint32_t i = 0; i < used.size(); ++i) {
    const auto& tensor = layout.tensor(i);
    EXPECT_NO_THROW(distckpt::require_exactly_once(tensor.name, tensor.shape, used[i], "linked"));
  }
  EXPECT_EQ(filled,
            "3.self_attention_sliding.linear_qkv.weight [4:8, 0:3]\n"
            "3.self_attention_sliding.linear_qkv.weight [12:16, 0:3]\n"
            "3.self_attention_sliding.k_layernorm.weight [0:2] ones\n"
            "4.self_attention_global.linear_qkv.weight [24:36, 0:3]\n"
            "4.self_attention_global.k_layernorm.weight [0:6] ones\n");
}

TEST(Gemma4, KeepsUnusedKeysAndValuesOfAFileThatHoldsThem) {
  const auto map =
      make_model_map(shared(), [](const std::string&) { return std::optional(distckpt::Shape()); });
  EXPECT_TRUE(map.index.contains("model.layers.3.self_attn.k_proj.weight"));
  EXPECT_TRUE(map.index.contains("model.layers.4.self_attn.k_norm.weight"));
  EXPECT_TRUE(link_megatron(map, stored(map)).padding.empty());
}

}  // namespace gemma_test
}  // namespace ferry::converter
