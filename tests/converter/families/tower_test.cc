// Towers of models that also see, beside the tensors that transformers names.
#include "converter/families/tower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/open/checkpoint.h"
#include "converter/optimizer/optimizer_tensors.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace tower_test {

using distckpt::ModelTensor;
using distckpt::Shape;
using support::fails;
using support::test_data;

Checkpoint open_model(const char* name) {
  return open(test_data(name) / "hf");
}

using Shapes = std::map<std::string, Shape>;

Shapes carried_shapes(const Checkpoint& checkpoint) {
  Shapes shapes;
  for (const auto& tensor : checkpoint.tensors)
    if (checkpoint.map.is_carried(tensor.name)) shapes.emplace(tensor.name, tensor.shape);
  return shapes;
}

class ComputedTower : public testing::TestWithParam<const char*> {};

TEST_P(ComputedTower, HasTheTensorsThatTransformersSaves) {
  const auto checkpoint = open_model(GetParam());
  const auto tower = make_vision_map(checkpoint.map.config);
  Shapes shapes;
  for (const auto& tensor : tower.tensors) shapes.emplace(tensor.name, tensor.shape);
  EXPECT_EQ(shapes, carried_shapes(checkpoint));
  ASSERT_EQ(tower.megatron.size(), tower.tensors.size());
  for (const auto& parameter : tower.megatron) {
    ASSERT_EQ(parameter.parts.size(), 1U) << parameter.key;
    EXPECT_EQ(parameter.parts.front().box, distckpt::Box::whole(parameter.shape));
    EXPECT_EQ(tower.tensors[parameter.parts.front().model].shape, parameter.shape);
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         ComputedTower,
                         testing::Values("hf_qwen3_vl", "hf_qwen3_vl_deep", "hf_qwen3_vl_moe"),
                         [](const auto& one) { return std::string(one.param); });

TEST(ComputedTower, NamesEachParameterByTheFirstRuleThatFits) {
  const auto name = [](std::string_view key) { return tower_name(kQwen3Tower, key).value(); };
  EXPECT_EQ(name("vision_model.decoder.layers.12.mlp.linear_fc1.layer_norm_bias"),
            "model.visual.blocks.12.norm2.bias");
  EXPECT_EQ(name("vision_model.decoder.layers.0.mlp.linear_fc1.bias"),
            "model.visual.blocks.0.mlp.linear_fc1.bias");
  EXPECT_EQ(name("vision_model.decoder.deepstack_merger_list.2.patch_norm.weight"),
            "model.visual.deepstack_merger_list.2.norm.weight");
  EXPECT_EQ(tower_name(kQwen3Tower, "decoder.layers.0.mlp.linear_fc1.weight"), std::nullopt);
}

TEST(ComputedTower, IsThatOfFamiliesThatAreComputed) {
  const auto config = open_model("hf_llama").map.config;
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"models of the family llama have no vision tower that is computed"},
                    [&] { make_vision_map(config); }));
}

TEST(TowerState, StacksLayersAsMbridgeDoes) {
  const auto checkpoint = open_model("hf_qwen2_5_vl_deep");  // three layers
  const auto state =
      tower_state(checkpoint.map, MegatronLayout::kMbridge, checkpoint.tensors, /*num_heads=*/2)
          .tensors;
  const auto qkv =
      std::ranges::find(state, "vision_model.decoder.layers.self_attention.linear_qkv.weight",
                        &distckpt::ShardedTensor::key);
  ASSERT_NE(qkv, state.end());
  const auto one = carried_shapes(checkpoint).at("visual.blocks.0.attn.qkv.weight");
  EXPECT_EQ(qkv->global_shape, (Shape{3, one[0], one[1]}));
}

TEST(TowerState, HasAsManyHeadsAsRowsAllow) {
  const auto checkpoint = open_model("hf_qwen2_5_vl_deep");
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"visual.blocks.0.attn.qkv", "of 7 heads"}, [&] {
    tower_state(checkpoint.map, MegatronLayout::kMbridge, checkpoint.tensors, 7);
  }));
}

// Megatron-Bridge 0.6.2's model has the same in its sharded_state_dict().
TEST(TowerState, HasTheStatesOfModulesOfTransformerEngine) {
  const auto checkpoint = open_model("hf_qwen3_vl_deep");  // three layers, two deepstack mergers
  std::map<std::string, int> layers;
  const auto state = tower_state(checkpoint.map, MegatronLayout::kMegatronBridge,
                                 checkpoint.tensors, /*num_heads=*/3);
  for (const auto& object : state.extra_states) {
    const auto index = layers[object.key]++;
    EXPECT_EQ(object.global_offset, (distckpt::Dims{index})) << object.key;
  }
  std::map<std::string, int> wanted;
  for (const auto* name : {"self_attention.linear_qkv", "self_attention.linear_proj",
                           "mlp.linear_fc1", "mlp.linear_fc2"})
    wanted[fmt::format("vision_model.decoder.layers.{}._extra_state", name)] = 3;
  for (const auto* name : {"patch_norm", "linear_fc1", "linear_fc2"}) {
    wanted[fmt::format("vision_model.decoder.deepstack_merger_list.{}._extra_state", name)] = 2;
    wanted[fmt::format("vision_model.merger.{}._extra_state", name)] = 1;
  }
  EXPECT_EQ(layers, wanted);
}

TEST(WrittenLayout, IsThatOfMegatronBridgeWhereMbridgeKeepsTheTowerAlike) {
  const auto written = [](const char* name) {
    return written_layout(*open_model(name).map.family, MegatronLayout::kMbridge);
  };
  EXPECT_EQ(written("hf_qwen3_vl"), MegatronLayout::kMegatronBridge);
  EXPECT_EQ(written("hf_qwen3_vl_moe"), MegatronLayout::kMegatronBridge);
  EXPECT_EQ(written("hf_qwen2_5_vl"), MegatronLayout::kMbridge);
  EXPECT_EQ(written("hf_qwen3_5_vl"), MegatronLayout::kMbridge);
  EXPECT_EQ(written("hf_llama"), MegatronLayout::kMbridge);  // which is refused by that name
}

TEST(TowerState, OfALayoutThatAFamilyLacksIsRefused) {
  const auto checkpoint = open_model("hf_llama");
  EXPECT_TRUE(fails(
      ErrorKind::kUsage, {"--megatron-layout mbridge: models of the family llama are not kept so"},
      [&] { tower_state(checkpoint.map, MegatronLayout::kMbridge, checkpoint.tensors, 1); }));
}

TEST(TowerState, NamesATensorThatIsMissingBesideOthers) {
  auto checkpoint = open_model("hf_qwen2_5_vl_deep");
  std::erase_if(checkpoint.tensors, [](const ModelTensor& tensor) {
    return tensor.name == "visual.blocks.1.mlp.up_proj.weight";
  });
  EXPECT_TRUE(
      fails(ErrorKind::kLayout,
            {"visual.blocks.1.mlp.up_proj.weight: is missing beside "
             "visual.blocks.1.mlp.gate_proj.weight"},
            [&] { tower_state(checkpoint.map, MegatronLayout::kMbridge, checkpoint.tensors, 2); }));
}

// The tower of a model as Megatron-Bridge stores it, without the keys that contain `lost`.
distckpt::Layout bridge_layout(const Checkpoint& checkpoint, std::string_view lost) {
  distckpt::Layout layout;
  const auto state = tower_state(checkpoint.map, MegatronLayout::kMegatronBridge,
                                 checkpoint.tensors, /*num_heads=*/3);
  for (const auto& tensor : state.tensors) {
    if (!lost.empty() && tensor.key.find(lost) != std::string::npos) continue;
    layout.add_tensor({.name = tensor.key, .dtype = tensor.dtype, .shape = tensor.global_shape});
  }
  return layout;
}

class BridgeTower : public testing::TestWithParam<const char*> {};

TEST_P(BridgeTower, HasThePlaceOfEachTensor) {
  const auto checkpoint = open_model(GetParam());
  const auto layout = bridge_layout(checkpoint, "");
  EXPECT_EQ(layout_of(*checkpoint.map.family, layout), MegatronLayout::kMegatronBridge);
  Shapes shapes;
  for (const auto& tensor :
       tower_tensors(*checkpoint.map.family, MegatronLayout::kMegatronBridge, layout))
    shapes.emplace(tensor.name, tensor.shape);
  EXPECT_EQ(shapes, carried_shapes(checkpoint));
}

INSTANTIATE_TEST_SUITE_P(Models,
                         BridgeTower,
                         testing::Values("hf_qwen3_vl_deep", "hf_qwen3_5_vl", "hf_qwen3_5_moe_vl"),
                         [](const auto& one) { return std::string(one.param); });

TEST(BridgeTower, LacksAllOfTheDeepstackOrNothing) {
  const auto checkpoint = open_model("hf_qwen3_vl_deep");
  const auto& family = *checkpoint.map.family;
  const auto read = [&](std::string_view lost) {
    return tower_tensors(family, MegatronLayout::kMegatronBridge, bridge_layout(checkpoint, lost));
  };
  EXPECT_EQ(read("deepstack").size(), carried_shapes(checkpoint).size() - 12);
  for (const auto* lost :
       {"deepstack_merger_list.patch_norm.bias", "vision_model.merger.linear_fc2.weight"})
    EXPECT_TRUE(fails(ErrorKind::kLayout, {lost, "is missing"}, [&] { read(lost); }));
}

TEST(ComputedTower, IsLinkedToItsOwnKeys) {
  const auto tower = make_vision_map(open_model("hf_qwen3_vl_deep").map.config);
  distckpt::Layout layout;
  for (const auto& tensor : tower.megatron) {
    layout.add_tensor({.name = tensor.key, .dtype = distckpt::DType::kBF16, .shape = tensor.shape});
  }
  EXPECT_EQ(link_megatron(tower, layout).links.size(), tower.megatron.size());
}

// Ranks that train both hold both: each map links its own.
TEST(ComputedTower, IsTrainedBesideTheLanguageModel) {
  auto map = open_model("hf_qwen3_vl_deep").map;
  const auto tower = make_vision_map(map.config);
  distckpt::Layout layout;
  for (const auto* part : std::vector<const ModelMap*>{&map, &tower}) {
    for (const auto& tensor : part->megatron)
      layout.add_tensor(
          {.name = tensor.key, .dtype = distckpt::DType::kBF16, .shape = tensor.shape});
  }
  EXPECT_EQ(link_megatron(tower, layout).links.size(), tower.megatron.size());
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"vision_model.", "no rule"}, [&] { link_megatron(map, layout); }));
  const auto of_language = optimizer_map(map, "param").tensors.size();
  map.trains_tower = true;
  EXPECT_GE(link_megatron(map, layout).links.size(), map.megatron.size());
  const auto state = optimizer_map(map, "param");
  EXPECT_EQ(state.tensors.size(), of_language + tower.megatron.size());
  EXPECT_EQ(state.tensors.back().name, "optimizer.state.param." + tower.megatron.back().key);
  EXPECT_EQ(state.tensors.back().shape, tower.megatron.back().shape);
}

TEST(MegatronLayout, HasANameEach) {
  for (const auto* name : {"language-model", "megatron-bridge", "mbridge", "slime"}) {
    const auto layout = megatron_layout(name);
    ASSERT_TRUE(layout.has_value()) << name;
    EXPECT_EQ(layout_name(*layout), name);
  }
  EXPECT_EQ(megatron_layout("bridge"), std::nullopt);
}

TEST(TowerKey, IsKnownByItsModule) {
  const auto& family = find_family("qwen2_5_vl");
  EXPECT_TRUE(is_tower_key(family, "module.vision_model.decoder.final_layernorm.weight"));
  EXPECT_TRUE(is_tower_key(family, "vision_model.projection.encoder.linear_fc1._extra_state"));
  EXPECT_TRUE(is_tower_key(family, "visual.blocks.0.norm1.weight"));
  EXPECT_TRUE(is_tower_key(find_family("qwen3_5"),
                           "vision_model.decoder.layers.mlp.linear_fc1._extra_state"));
  EXPECT_FALSE(is_tower_key(family, "language_model.decoder.final_layernorm.weight"));
  EXPECT_EQ(language_model_key("module.language_model.decoder.final_layernorm.weight"),
            "decoder.final_layernorm.weight");
}

TEST(TowerHeads, AreThoseOfConfigJson) {
  EXPECT_EQ(tower_heads(R"({"vision_config": {"num_heads": 16}})", "config.json"), 16);
  EXPECT_EQ(tower_heads(R"({"vision_config": {}})", "config.json"), 0);
  EXPECT_EQ(tower_heads("{}", "config.json"), 0);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", "num_heads"}, [] {
    tower_heads(R"({"vision_config": {"num_heads": "many"}})", "config.json");
  }));
}

}  // namespace tower_test
}  // namespace ferry::converter
