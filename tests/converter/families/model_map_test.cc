#include "converter/families/model_map.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/optimizer/sharded_state.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace model_map_test {

using distckpt::Box;
using support::fails;

// The example of docs/mapping.md: A=4, G=2, D=2.
models::TransformerConfig example() {
  return {.family = "llama",
          .num_layers = 1,
          .hidden_size = 3,
          .ffn_hidden_size = 4,
          .num_attention_heads = 4,
          .num_query_groups = 2,
          .kv_channels = 2,
          .vocab_size = 10};
}

const MegatronTensor& find(const ModelMap& map, const std::string& name) {
  for (const auto& tensor : map.megatron) {
    if (tensor.key == name) return tensor;
  }
  fail(ErrorKind::kNotFound, "{}", name);
}

TEST(ModelMap, InterleavesQkvByGroupAsTheDocumentationWorksIt) {
  const auto map = make_model_map(example());
  const auto& qkv = find(map, "decoder.layers.0.self_attention.linear_qkv.weight");
  EXPECT_EQ(qkv.shape, (distckpt::Shape{16, 3}));
  const std::vector<std::string> expected{"q 0:4 -> 0:4",  "k 0:2 -> 4:6",   "v 0:2 -> 6:8",
                                          "q 4:8 -> 8:12", "k 2:4 -> 12:14", "v 2:4 -> 14:16"};
  std::vector<std::string> found;
  for (const auto& part : qkv.parts) {
    const auto& name = map.tensors[part.model].name;
    found.push_back(fmt::format("{} {}:{} -> {}:{}", name[name.find("_proj") - 1],
                                part.model_box.offset[0], part.model_box.end(0), part.box.offset[0],
                                part.box.end(0)));
  }
  EXPECT_EQ(found, expected);
}

TEST(ModelMap, GivesEachRankGateAndUpOfItsOwn) {
  const auto map = make_model_map(example());
  const std::vector<distckpt::DType> dtypes(map.megatron.size(), distckpt::DType::kBF16);
  const auto ranks = sharded_state(
      map, dtypes, {.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 4});
  ASSERT_EQ(ranks.size(), 2U);
  std::vector<std::int64_t> rows;
  for (const auto& tensor : ranks[1].tensors) {
    if (tensor.key == "decoder.layers.mlp.linear_fc1.weight")
      rows.push_back(tensor.global_offset[1]);
    if (tensor.key == "embedding.word_embeddings.weight") {
      EXPECT_EQ(tensor.global_shape,
                (distckpt::Shape{16, 3}));  // 10 rows, padded to a multiple of 4 * 2
    }
    if (tensor.key == "decoder.final_layernorm.weight") {
      EXPECT_FALSE(tensor.is_main_replica());  // rank 0 writes it
    }
  }
  EXPECT_EQ(rows, (std::vector<std::int64_t>{2, 6}));
  EXPECT_TRUE(ranks[1].extra_states.empty());
}

// "2:4 of t -> 0:2" of each part of a tensor.
std::vector<std::string> parts_of(const ModelMap& map, const std::string& name) {
  std::vector<std::string> found;
  for (const auto& part : find(map, name).parts) {
    found.push_back(fmt::format("{}:{} of {} -> {}:{}", part.model_box.offset[0],
                                part.model_box.end(0), map.tensors[part.model].name,
                                part.box.offset[0], part.box.end(0)));
  }
  return found;
}

TEST(ModelMap, DealsTheRowsOfOneTensorOfQueryKeyAndValueToTheGroups) {
  auto config = example();
  config.family = "bailing_moe_v2";
  const auto map = make_model_map(config);
  const std::string qkv = "model.layers.0.attention.query_key_value.weight";
  EXPECT_EQ(map.tensors[map.index.at(qkv)].shape, (distckpt::Shape{16, 3}));
  EXPECT_EQ(
      parts_of(map, "decoder.layers.0.self_attention.linear_qkv.weight"),
      (std::vector<std::string>{"0:4 of " + qkv + " -> 0:4", "8:10 of " + qkv + " -> 4:6",
                                "12:14 of " + qkv + " -> 6:8", "4:8 of " + qkv + " -> 8:12",
                                "10:12 of " + qkv + " -> 12:14", "14:16 of " + qkv + " -> 14:16"}));
}

TEST(ModelMap, HasTheTensorsOfPhi) {
  auto config = example();
  config.family = "phi3";
  std::set<std::string> names;
  for (const auto& tensor : make_model_map(config).tensors) names.insert(tensor.name);
  const std::string layer = "model.layers.0.";
  EXPECT_EQ(names,
            (std::set<std::string>{
                "lm_head.weight", "model.embed_tokens.weight", layer + "input_layernorm.weight",
                layer + "mlp.down_proj.weight", layer + "mlp.gate_up_proj.weight",
                layer + "post_attention_layernorm.weight", layer + "self_attn.o_proj.weight",
                layer + "self_attn.qkv_proj.weight", "model.norm.weight"}));
}

TEST(ModelMap, TakesGateAndUpOfOneTensorAsTheyLie) {
  auto config = example();
  config.family = "glm4";
  const auto map = make_model_map(config);
  const std::string gate_up = "model.layers.0.mlp.gate_up_proj.weight";
  EXPECT_EQ(map.tensors[map.index.at(gate_up)].shape, (distckpt::Shape{8, 3}));
  EXPECT_EQ(
      parts_of(map, "decoder.layers.0.mlp.linear_fc1.weight"),
      (std::vector<std::string>{"0:4 of " + gate_up + " -> 0:4", "4:8 of " + gate_up + " -> 4:8"}));
}

// Qwen3-VL's experts: the hub has them transposed, transformers 5 saves them as it holds them.
TEST(ModelMap, TakesExpertsOfOneTensorInEitherOrientation) {
  auto config = example();
  config.family = "qwen3_vl_moe";
  config.qk_layernorm = true;
  config.num_moe_experts = 5;
  config.moe_layer_freq = {true};
  config.moe_ffn_hidden_size = 6;
  config.hidden_size = 12;  // as wide as gate and up are high: gate_up_proj does not tell
  const std::string experts = "model.language_model.layers.0.mlp.experts.";
  const auto shapes_where = [&](const distckpt::Shape& down) {
    const auto map = make_model_map(config, [&](const std::string& name) {
      return name == experts + "down_proj" ? std::optional(down) : std::nullopt;
    });
    const auto& part = find(map, "decoder.layers.0.mlp.experts.experts.linear_fc1.weight").parts[1];
    return std::pair(map.tensors[map.index.at(experts + "down_proj")].shape,
                     fmt::format("{} {}", part.model_box.offset[1], part.model_box.offset[2]));
  };
  using distckpt::Shape;
  EXPECT_EQ(shapes_where({5, 6, 12}), std::pair(Shape({5, 6, 12}), std::string("0 6")));
  EXPECT_EQ(shapes_where({5, 12, 6}), std::pair(Shape({5, 12, 6}), std::string("6 0")));
  EXPECT_EQ(shapes_where({}), std::pair(Shape({5, 6, 12}), std::string("0 6")));
}

TEST(ModelMap, LaysABiasThatIsARowFlat) {
  auto config = example();
  config.family = "ernie4_5_moe";
  config.traits.moe_router_parameter_in_fp32 = true;
  config.num_moe_experts = 5;
  config.moe_layer_freq = {true};
  config.moe_ffn_hidden_size = 4;
  config.moe_router_enable_expert_bias = true;
  const auto map = make_model_map(config);
  const auto& bias = find(map, "decoder.layers.0.mlp.router.expert_bias");
  EXPECT_EQ(bias.shape, distckpt::Shape{5});
  EXPECT_EQ(bias.parts.at(0).model_box, Box::whole({1, 5}));
  EXPECT_EQ(bias.parts.at(0).box, Box::whole({5}));
}

TEST(ModelMap, RefusesSizesThatOverflow) {
  auto config = example();
  config.hidden_size = std::int64_t{1} << 31;
  config.ffn_hidden_size = std::int64_t{1} << 31;
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"model.layers.0.mlp.gate_proj.weight", "[2147483648, 2147483648]"},
                    [&] { make_model_map(config); }));
}

TEST(ModelMap, NamesMissingSurplusAndMisshapenTensors) {
  const auto map = make_model_map(example());
  const auto layout_with = [&](auto&& change) {
    distckpt::Layout layout;
    for (const auto& tensor : map.megatron) {
      auto shape = tensor.shape;
      auto name = tensor.key;
      if (change(name, shape)) layout.add_tensor({.name = name, .shape = shape, .shards = {}});
    }
    return layout;
  };
  EXPECT_NO_THROW(link_megatron(map, layout_with([](auto&, auto&) { return true; })));
  EXPECT_NO_THROW(link_megatron(map, layout_with([](auto& name, auto&) {
                                  name = "module.module." + name;
                                  return true;
                                })));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc2.weight", "is missing", "down_proj"}, [&] {
    link_megatron(
        map, layout_with([](auto& name, auto&) { return !name.ends_with("linear_fc2.weight"); }));
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc2.weight", "[4, 3]", "expected [3, 4]"}, [&] {
    link_megatron(map, layout_with([](auto& name, auto& shape) {
                    if (name.ends_with("linear_fc2.weight")) shape = {4, 3};
                    return true;
                  }));
  }));
  auto surplus = layout_with([](auto&, auto&) { return true; });
  surplus.add_tensor({.name = "decoder.layers.0.mlp.router.weight", .shape = {1}, .shards = {}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"router.weight", "no rule"},
                    [&] { link_megatron(map, surplus); }));
}

TEST(ModelMap, RefusesExtraStatesThatAreIncompleteOrUnknown) {
  auto config = example();
  config.num_layers = 2;
  const auto map = make_model_map(config);
  const std::string good = "decoder.layers.mlp.linear_fc1._extra_state/shard_";
  EXPECT_NO_THROW(check_object_keys(map, {good + "0_2", good + "1_2", "rng_state/shard_0.0_1.1"}));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"linear_fc1", "1 of 2"},
                    [&] { check_object_keys(map, {good + "0_2"}); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"linear_fc7"}, [&] {
    check_object_keys(map, {"decoder.layers.mlp.linear_fc7._extra_state/shard_0_1"});
  }));
}

}  // namespace model_map_test
}  // namespace ferry::converter
