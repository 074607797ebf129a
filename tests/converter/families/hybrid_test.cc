// Gated delta nets and gated attention: each row of a Megatron tensor is the row of a Hugging Face
// tensor that the formulas of both models name, whatever the sizes.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "converter/families/hf_config.h"
#include "converter/families/model_map.h"
#include "models/spec/sharding.h"
#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"

namespace ferry::converter {
namespace hybrid_test {

using models::TransformerConfig;
using support::fails;
using support::Random;

TransformerConfig random_config(Random& random, std::string family) {
  TransformerConfig config{.family = std::move(family),
                           .num_layers = 2,
                           .hidden_size = 3,
                           .ffn_hidden_size = 4,
                           .num_query_groups = random.between(1, 3),
                           .kv_channels = 2 * random.between(1, 3),
                           .vocab_size = 5,
                           .qk_layernorm = true};
  config.num_attention_heads = config.num_query_groups * random.between(1, 4);
  config.linear_attention_freq = {true, false};
  config.linear_conv_kernel_dim = random.between(1, 4);
  config.linear_key_head_dim = random.between(1, 5);
  config.linear_value_head_dim = random.between(1, 5);
  config.linear_num_key_heads = random.between(1, 4);
  config.linear_num_value_heads = config.linear_num_key_heads * random.between(1, 3);
  config.attention_output_gate = true;
  config.layernorm_zero_centered_gamma = true;
  return config;
}

// The Hugging Face tensor and its row, for each row of a Megatron tensor.
using Rows = std::vector<std::pair<std::string, std::int64_t>>;

Rows rows_of_key(const ModelMap& map, const std::string& key) {
  for (const auto& tensor : map.megatron) {
    if (tensor.key != key) continue;
    Rows rows(static_cast<std::size_t>(tensor.shape[0]));
    for (const auto& part : tensor.parts) {
      const auto& name = map.tensors[part.model].name;
      for (std::int64_t i = 0; i < part.box.size[0]; ++i) {
        auto& row = rows.at(static_cast<std::size_t>(part.box.offset[0] + i));
        EXPECT_TRUE(row.first.empty()) << key << " names a row twice";
        row = {name.substr(name.find("attn.") + 5), part.model_box.offset[0] + i};
      }
    }
    return rows;
  }
  fail(ErrorKind::kNotFound, "{}", key);
}

// Hugging Face's in_proj_qkvz holds for each key head its query, its key, and the values and gates
// of its value heads (modeling_qwen3_next.py, fix_query_key_value_ordering).
TEST(Hybrid, TakesADeltaNetOfQwen3NextApartByKeyHeads) {
  for (int seed = 0; seed < 50; ++seed) {
    Random random(seed);
    const auto config = random_config(random, "qwen3_next");
    const auto map = make_model_map(config);
    const auto key = config.linear_key_head_dim;
    const auto ratio = config.linear_num_value_heads / config.linear_num_key_heads;
    const auto values = ratio * config.linear_value_head_dim;
    const auto expect = [&](const char* part, const char* tensor, std::int64_t of_head,
                            std::int64_t from, std::int64_t stride) {
      const auto rows =
          rows_of_key(map, fmt::format("decoder.layers.0.self_attention.in_proj.weight.{}", part));
      for (std::int64_t i = 0; i < std::ssize(rows); ++i) {
        const std::pair<std::string, std::int64_t> wanted{
            tensor, i / of_head * stride + from + i % of_head};
        ASSERT_EQ(rows[static_cast<std::size_t>(i)], wanted) << part << " seed " << seed;
      }
    };
    const auto stride = 2 * (key + values);
    expect("query", "in_proj_qkvz.weight", key, 0, stride);
    expect("key", "in_proj_qkvz.weight", key, key, stride);
    expect("value", "in_proj_qkvz.weight", values, 2 * key, stride);
    expect("z", "in_proj_qkvz.weight", values, 2 * key + values, stride);
    expect("beta", "in_proj_ba.weight", ratio, 0, 2 * ratio);
    expect("alpha", "in_proj_ba.weight", ratio, ratio, 2 * ratio);
  }
}

TEST(Hybrid, TakesADeltaNetOfQwen35ApartInOneGo) {
  for (int seed = 0; seed < 50; ++seed) {
    Random random(seed);
    const auto config = random_config(random, "qwen3_5_text");
    const auto map = make_model_map(config);
    const auto keys = config.linear_num_key_heads * config.linear_key_head_dim;
    for (const auto& [module, tensor] :
         {std::pair{"in_proj", "in_proj_qkv.weight"}, {"conv1d", "conv1d.weight"}}) {
      std::int64_t from = 0;
      for (const auto* part : {"query", "key", "value"}) {
        const auto rows = rows_of_key(
            map, fmt::format("decoder.layers.0.self_attention.{}.weight.{}", module, part));
        for (const auto& row : rows) ASSERT_EQ(row, std::pair(std::string(tensor), from++));
      }
      EXPECT_EQ(from, 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim);
    }
  }
}

// q_proj holds for each head its query and its gate, linear_qkv for each group its queries, their
// gates, its key and its value (Megatron-Core attention.py, get_query_key_value_tensors).
TEST(Hybrid, SeparatesQueriesFromTheirGates) {
  for (int seed = 0; seed < 50; ++seed) {
    Random random(seed);
    const auto config = random_config(random, "qwen3_next");
    const auto rows =
        rows_of_key(make_model_map(config), "decoder.layers.1.self_attention.linear_qkv.weight");
    const auto dim = config.kv_channels;
    const auto heads = config.num_attention_heads / config.num_query_groups;
    std::size_t at = 0;
    for (std::int64_t group = 0; group < config.num_query_groups; ++group) {
      for (const auto gate : {0, 1}) {
        for (std::int64_t i = 0; i < heads * dim; ++i) {
          const auto head = group * heads + i / dim;
          ASSERT_EQ(rows[at++],
                    std::pair(std::string("q_proj.weight"), (2 * head + gate) * dim + i % dim));
        }
      }
      for (const auto* name : {"k_proj.weight", "v_proj.weight"}) {
        for (std::int64_t i = 0; i < dim; ++i)
          ASSERT_EQ(rows[at++], std::pair(std::string(name), group * dim + i));
      }
    }
    EXPECT_EQ(at, rows.size());
  }
}

TEST(Hybrid, ReadsExpertsApartOrTogetherAsTheFilesHoldThem) {
  Random random(1);
  auto config = random_config(random, "qwen3_5_moe_text");
  config.num_moe_experts = 3;
  config.moe_layer_freq = {true, true};
  config.moe_ffn_hidden_size = 2;
  config.moe_shared_expert_intermediate_size = 2;
  config.moe_shared_expert_gate = true;
  config.mtp_num_layers = 1;
  const auto has = [](const std::string& name) { return name.starts_with("mtp."); };
  const auto map = make_model_map(config, has);
  const auto packed = map.index.find("mtp.layers.0.mlp.experts.gate_up_proj");
  ASSERT_NE(packed, map.index.end());
  EXPECT_EQ(map.tensors[packed->second].shape, (distckpt::Shape{3, 4, 3}));
  EXPECT_TRUE(map.index.contains("model.layers.0.mlp.experts.2.gate_proj.weight"));
  EXPECT_FALSE(map.index.contains("model.layers.0.mlp.experts.gate_up_proj"));
  for (const auto& tensor : map.megatron) {
    if (!tensor.expert || tensor.parts.front().model != packed->second) continue;
    for (const auto& part : tensor.parts) EXPECT_EQ(part.model_box.offset[0], *tensor.expert);
  }
}

TEST(Hybrid, IsSplitByWholeHeadsAlone) {
  Random random(2);
  auto config = random_config(random, "qwen3_next");
  config.num_attention_heads = config.num_query_groups = 6;
  config.linear_num_key_heads = 3;
  config.linear_key_head_dim = 4;
  config.linear_num_value_heads = 6;
  const auto found =
      models::find_indivisible(config, {.tensor_model_parallel_size = 2}, models::Alignment::kFast);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->what, "3 key heads of linear attention");
}

TEST(Hybrid, ReadsTheKindsOfLayers) {
  const auto parse = [](const std::string& more) {
    return parse_hf_config(
        R"({"model_type": "qwen3_5_text", "hidden_size": 8, "intermediate_size": 9, "num_hidden_layers": 5, "num_attention_heads": 2,
            "head_dim": 8, "vocab_size": 7)" +
            more + "}",
        "config.json");
  };
  EXPECT_EQ(parse("").linear_attention_freq, (std::vector<bool>{true, true, true, false, true}));
  EXPECT_EQ(parse(R"(, "full_attention_interval": 2)").linear_attention_freq,
            (std::vector<bool>{true, false, true, false, true}));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"sliding_attention"}, [&] {
    parse(
        R"(, "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention", "full_attention"])");
  }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"is no multiple of linear_num_key_heads"},
                    [&] { parse(R"(, "linear_num_key_heads": 5)"); }));
}

}  // namespace hybrid_test
}  // namespace ferry::converter
