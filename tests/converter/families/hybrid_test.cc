// Gated delta nets, gated attention and Mamba-2 mixers: each row of a Megatron tensor is the row of
// a Hugging Face tensor that the formulas of both models name, whatever the sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "converter/adapter/factors/adapter_map.h"
#include "converter/families/hf_config.h"
#include "converter/families/model_map.h"
#include "models/spec/sharding.h"
#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"

namespace ferry::converter {
namespace hybrid_test {

using models::TransformerConfig;
using support::fails;
using support::Random;

class RandomHybrid : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, RandomHybrid, RandomHybrid::all());

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
        const auto module = std::min(name.find("attn."), name.find("ixer."));
        row = {name.substr(module + 5), part.model_box.offset[0] + i};
      }
    }
    return rows;
  }
  fail(ErrorKind::kNotFound, "{}", key);
}

// Hugging Face's in_proj_qkvz holds for each key head its query, its key, and the values and gates
// of its value heads (modeling_qwen3_next.py, fix_query_key_value_ordering).
TEST_P(RandomHybrid, TakesADeltaNetOfQwen3NextApartByKeyHeads) {
  for_each_seed(0, 49, [&](std::uint64_t seed) {
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
        ASSERT_EQ(rows[static_cast<std::size_t>(i)], wanted) << part;
      }
    };
    const auto stride = 2 * (key + values);
    expect("query", "in_proj_qkvz.weight", key, 0, stride);
    expect("key", "in_proj_qkvz.weight", key, key, stride);
    expect("value", "in_proj_qkvz.weight", values, 2 * key, stride);
    expect("z", "in_proj_qkvz.weight", values, 2 * key + values, stride);
    expect("beta", "in_proj_ba.weight", ratio, 0, 2 * ratio);
    expect("alpha", "in_proj_ba.weight", ratio, ratio, 2 * ratio);
  });
}

TEST_P(RandomHybrid, TakesADeltaNetOfQwen35ApartInOneGo) {
  for_each_seed(0, 49, [&](std::uint64_t seed) {
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
  });
}

// q_proj holds for each head its query and its gate, linear_qkv for each group its queries, their
// gates, its key and its value (Megatron-Core attention.py, get_query_key_value_tensors).
TEST_P(RandomHybrid, SeparatesQueriesFromTheirGates) {
  for_each_seed(0, 49, [&](std::uint64_t seed) {
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
  });
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
  const auto find = [](const std::string& name) {
    return name.starts_with("mtp.") ? std::optional(distckpt::Shape()) : std::nullopt;
  };
  const auto map = make_model_map(config, find);
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

TransformerConfig random_nemotron(Random& random) {
  TransformerConfig config{.family = "nemotron_h",
                           .num_layers = 4,
                           .hidden_size = random.between(1, 9),
                           .ffn_hidden_size = random.between(1, 9),
                           .num_attention_heads = 2,
                           .num_query_groups = 1,
                           .kv_channels = 2,
                           .vocab_size = 5,
                           .activation = models::Activation::kSquaredRelu,
                           .gated_linear_unit = false};
  config.hybrid_layer_pattern = "M*E-";
  config.linear_conv_kernel_dim = 4;
  config.mamba_num_groups = random.between(1, 4);
  config.mamba_num_heads = config.mamba_num_groups * random.between(1, 4);
  config.mamba_head_dim = random.between(1, 5);
  config.mamba_state_dim = random.between(1, 5);
  config.num_moe_experts = random.between(1, 3);
  config.moe_layer_freq = {false, false, true, false};
  config.moe_ffn_hidden_size = random.between(1, 9);
  config.moe_latent_size = random.between(1, 9);
  config.moe_shared_expert_intermediate_size = random.between(1, 9);
  config.moe_router_enable_expert_bias = true;
  return config;
}

// in_proj gives z, x, B, C and dt, conv1d takes x, B and C, one behind the other
// (modeling_nemotron_h.py, NemotronHMamba2Mixer; MambaMixer.sharded_state_dict).
TEST_P(RandomHybrid, TakesAMambaMixerApartInOneGo) {
  for_each_seed(0, 49, [&](std::uint64_t seed) {
    Random random(seed);
    const auto config = random_nemotron(random);
    const auto map = make_model_map(config);
    const std::string inner = "zx";
    for (const auto& [tensor, parts] : {std::pair<std::string, std::vector<std::string>>{
                                            "in_proj.weight", {"z", "x", "B", "C", "dt"}},
                                        {"conv1d.weight", {"x", "B", "C"}},
                                        {"conv1d.bias", {"x", "B", "C"}}}) {
      std::int64_t from = 0;
      for (const auto& part : parts) {
        const auto rows =
            rows_of_key(map, fmt::format("decoder.layers.0.mixer.{}.{}", tensor, part));
        const auto size = part == "dt" ? config.mamba_num_heads
                          : inner.find(part) != std::string::npos
                              ? config.mamba_num_heads * config.mamba_head_dim
                              : config.mamba_num_groups * config.mamba_state_dim;
        ASSERT_EQ(std::ssize(rows), size) << tensor << " " << part;
        for (const auto& row : rows) ASSERT_EQ(row, std::pair(tensor, from++));
      }
      const auto whole = map.index.at("backbone.layers.0.mixer." + tensor);
      EXPECT_EQ(map.tensors[whole].shape[0], from);
    }
  });
}

TEST(Hybrid, HasOneModuleALayerAndNoGates) {
  Random random(3);
  const auto config = random_nemotron(random);
  const auto map = make_model_map(config);
  const auto expect = [&](const char* key, const char* name, const distckpt::Shape& shape) {
    for (const auto& tensor : map.megatron) {
      if (tensor.key != key || tensor.expert.value_or(0) != 0) continue;
      EXPECT_EQ(tensor.shape, shape) << key;
      EXPECT_EQ(tensor.merge, models::Merge::kCopy) << key;
      ASSERT_EQ(tensor.parts.size(), 1U) << key;
      EXPECT_EQ(map.tensors[tensor.parts[0].model].name, name);
      return;
    }
    ADD_FAILURE() << key << " is missing";
  };
  const auto hidden = config.hidden_size;
  const auto latent = config.moe_latent_size;
  expect("decoder.layers.3.mlp.linear_fc1.weight", "backbone.layers.3.mixer.up_proj.weight",
         {config.ffn_hidden_size, hidden});
  expect("decoder.layers.2.mlp.experts.experts.linear_fc1.weight",
         "backbone.layers.2.mixer.experts.0.up_proj.weight", {config.moe_ffn_hidden_size, latent});
  expect("decoder.layers.2.mlp.experts.experts.linear_fc2.weight",
         "backbone.layers.2.mixer.experts.0.down_proj.weight",
         {latent, config.moe_ffn_hidden_size});
  expect("decoder.layers.2.mlp.fc1_latent_proj.weight",
         "backbone.layers.2.mixer.fc1_latent_proj.weight", {latent, hidden});
  expect("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
         "backbone.layers.1.norm.weight", {hidden});
  expect("decoder.final_norm.weight", "backbone.norm_f.weight", {hidden});
  EXPECT_FALSE(map.index.contains("backbone.layers.1.mixer.up_proj.weight"));
}

TEST(Hybrid, CountsTheLayersOfPredictionLayersTogether) {
  Random random(4);
  auto config = random_nemotron(random);
  config.mtp_num_layers = 2;
  config.mtp_hybrid_override_pattern = "*E";
  const auto map = make_model_map(config);
  for (const auto* name : {"mtp.layers.0.enorm.weight", "mtp.layers.1.final_layernorm.weight",
                           "mtp.layers.2.eh_proj.weight", "mtp.layers.2.mixer.q_proj.weight",
                           "mtp.layers.3.mixer.gate.weight", "mtp.layers.3.final_layernorm.weight"})
    EXPECT_TRUE(map.index.contains(name)) << name;
  EXPECT_FALSE(map.index.contains("mtp.layers.1.enorm.weight"));
  EXPECT_TRUE(is_prediction_tensor(config, "mtp.layers.3.norm.weight"));
  EXPECT_FALSE(is_prediction_tensor(config, "backbone.layers.3.norm.weight"));
}

TEST(Hybrid, IsSplitByWholeGroupsOfMambaLayersAlone) {
  Random random(5);
  auto config = random_nemotron(random);
  config.mamba_num_groups = 3;
  const auto found =
      models::find_indivisible(config, {.tensor_model_parallel_size = 2}, models::Alignment::kFast);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->what, "3 groups of Mamba layers");
}

TEST(Hybrid, HasNoAdaptersOfMambaLayers) {
  Random random(6);
  const auto base = make_model_map(random_nemotron(random));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"adapters of models of the family nemotron_h"},
                    [&] { make_adapter_map(base, {}); }));
}

TEST(Hybrid, TakesTheSizeOfHeadsInTheWordsOfNemotronH) {
  const auto channels = [](const std::string& more) {
    const auto* const sizes =
        R"({"model_type": "nemotron_h", "hidden_size": 12, "intermediate_size": 9,
            "num_attention_heads": 3, "mamba_num_heads": 2, "mamba_head_dim": 3,
            "ssm_state_size": 5, "vocab_size": 7, "hybrid_override_pattern": "M-*",
            "num_hidden_layers": 3)";
    return parse_hf_config(sizes + more + "}", "config.json").kv_channels;
  };
  EXPECT_EQ(channels(R"(, "attention_head_dim": 6)"), 6);
  EXPECT_EQ(channels(R"(, "head_dim": 8, "attention_head_dim": 6)"), 8);
  EXPECT_EQ(channels(""), 128);
}

TEST(Hybrid, ReadsThePatternOfLayersInBothWords) {
  const auto parse = [](const std::string& more) {
    return parse_hf_config(
        R"({"model_type": "nemotron_h", "hidden_size": 8, "intermediate_size": 9, "num_attention_heads": 2, "mamba_num_heads": 2,
            "mamba_head_dim": 3, "ssm_state_size": 5, "head_dim": 4, "vocab_size": 7, "n_routed_experts": 4, "moe_intermediate_size": 6,
            "moe_shared_expert_intermediate_size": 6, )" +
            more + "}",
        "config.json");
  };
  const auto hub = parse(R"("hybrid_override_pattern": "M-*E", "num_hidden_layers": 4)");
  EXPECT_EQ(hub, parse(R"("layers_block_type": ["mamba", "mlp", "attention", "moe"])"));
  EXPECT_EQ(hub,
            parse(R"("layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"])"));
  EXPECT_EQ(hub.num_moe_experts, 4);
  EXPECT_EQ(parse(R"("hybrid_override_pattern": "M-*", "num_hidden_layers": 3)").num_moe_experts,
            0);
  const auto tied = R"("hybrid_override_pattern": "M", "num_hidden_layers": 1,
                       "tie_word_embeddings": true)";
  EXPECT_TRUE(parse(tied).untie_embeddings_and_output_weights);  // its class ties nothing
  const auto refused = [&](const std::string& more, ErrorKind kind, const char* word) {
    EXPECT_TRUE(fails(kind, {word}, [&] { parse(more); })) << more;
  };
  refused(R"("hybrid_override_pattern": "M-G", "num_hidden_layers": 3)", ErrorKind::kLayout, "M-G");
  refused(R"("hybrid_override_pattern": "M-", "num_hidden_layers": 3)", ErrorKind::kCorrupt,
          "2 kinds of layers");
  refused(R"("layers_block_type": ["conv"])", ErrorKind::kLayout, "conv");
  const std::string plain = R"("hybrid_override_pattern": "M", "num_hidden_layers": 1, )";
  refused(plain + R"("conv_kernel": 3)", ErrorKind::kLayout, "conv_kernel is 3");
  refused(plain + R"("use_conv_bias": false)", ErrorKind::kLayout, "use_conv_bias");
  refused(plain + R"("mlp_hidden_act": "silu")", ErrorKind::kLayout, "mlp_hidden_act");
  refused(plain + R"("mamba_hidden_act": "gelu")", ErrorKind::kLayout, "mamba_hidden_act");
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
