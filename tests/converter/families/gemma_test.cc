// Gemma 4: layers of two sizes of attention, stacked by their kind, and values that are keys.
#include <gtest/gtest.h>

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

}  // namespace gemma_test
}  // namespace ferry::converter
