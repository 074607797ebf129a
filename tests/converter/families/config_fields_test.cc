// Members of config.json, and what several families say alike.
#include "converter/families/config_fields.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace config_fields_test {

using models::TransformerConfig;
using nlohmann::json;
using support::fails;

TEST(ConfigFields, TakeNullForAMemberThatIsNotGiven) {
  const json object{{"a", nullptr}, {"b", 3}, {"c", 1.5}, {"d", true}, {"e", "text"}};
  const ConfigFields fields(object, "config.json");
  EXPECT_EQ(fields.find("a"), nullptr);
  EXPECT_EQ(fields.size("a", 7), 7);
  EXPECT_EQ(fields.size("b", 7), 3);
  EXPECT_FALSE(fields.optional_size("a").has_value());
  EXPECT_EQ(fields.count("a", 2, 9), 2);
  EXPECT_EQ(fields.optional_number("b"), 3.0);
  EXPECT_EQ(fields.optional_number("c"), 1.5);
  EXPECT_TRUE(fields.flag("d", false));
  EXPECT_TRUE(fields.flag("a", true));
  EXPECT_EQ(fields.text("e", ""), "text");
  EXPECT_EQ(fields.text("a", "silu"), "silu");
}

TEST(ConfigFields, NameTheMemberThatIsOutOfItsLimits) {
  const json object{{"zero", 0}, {"many", 70000}, {"below", -1}, {"text", "8"}, {"half", 0.5}};
  const ConfigFields fields(object, "config.json");
  const auto refuses = [&](std::string_view words, auto&& read) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", words}, read)) << words;
  };
  refuses("zero is 0, expected 1 to", [&] { fields.size("zero"); });
  refuses("many is 70000, expected 1 to 65536", [&] { fields.size("many", 1, kMaxLayers); });
  refuses("below is -1, expected 0 to 10", [&] { fields.count("below", 0, 10); });
  refuses("text is \"8\", an integer is expected", [&] { fields.size("text"); });
  refuses("half is 0.5, an integer is expected", [&] { fields.optional_size("half"); });
  refuses("the key \"absent\" is missing", [&] { fields.size("absent"); });
  refuses("zero is 0, true or false is expected", [&] { fields.flag("zero", true); });
  refuses("text is \"8\", a number is expected", [&] { fields.optional_number("text"); });
  refuses("zero is 0, a string is expected", [&] { fields.text("zero", ""); });
  refuses("not a JSON object", [] { ConfigFields(json::array(), "config.json"); });
  const json wide{{"x", std::numeric_limits<double>::infinity()}};
  refuses("x is not finite", [&] { ConfigFields(wide, "config.json").optional_number("x"); });
}

TEST(LayersOfKind, SayOfEachLayerWhetherItIsOfTheKind) {
  const json object{{"layer_types", {"sliding", "full", "sliding"}}};
  const ConfigFields fields(object, "config.json");
  EXPECT_EQ(layers_of_kind(fields, "layer_types", "sliding", "full", 3),
            (std::vector<bool>{true, false, true}));
  EXPECT_FALSE(layers_of_kind(fields, "other", "sliding", "full", 3).has_value());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"layer_types is no list of 4 layers"},
                    [&] { layers_of_kind(fields, "layer_types", "sliding", "full", 4); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"names \"full\", which is not handled"},
                    [&] { layers_of_kind(fields, "layer_types", "sliding", "chunked", 3); }));
}

std::vector<bool> experts_of(const json& object,
                             void (*read)(const ConfigFields&, TransformerConfig&)) {
  TransformerConfig config{.num_layers = 6};
  read(ConfigFields(object, "config.json"), config);
  return config.moe_layer_freq;
}

TEST(ReadDenseLayers, TakeTheListOfLayersBeforeTheNumberOfThem) {
  EXPECT_EQ(experts_of({{"first_k_dense_replace", 2}}, read_dense_layers),
            (std::vector<bool>{false, false, true, true, true, true}));
  EXPECT_EQ(experts_of({{"first_k_dense_replace", 99}}, read_dense_layers),
            std::vector<bool>(6, false));
  EXPECT_EQ(experts_of(json::object(), read_dense_layers), std::vector<bool>(6, true));
  EXPECT_EQ(
      experts_of({{"first_k_dense_replace", 2},
                  {"mlp_layer_types", {"dense", "sparse", "dense", "sparse", "sparse", "sparse"}}},
                 read_dense_layers),
      (std::vector<bool>{false, true, false, true, true, true}));
}

TEST(ReadQwenExperts, CountStepsAndLayersThatAreNamed) {
  const json experts{{"num_experts", 8}, {"moe_intermediate_size", 16}};
  auto stepped = experts;
  stepped["decoder_sparse_step"] = 2;
  EXPECT_EQ(experts_of(stepped, read_qwen_experts),
            (std::vector<bool>{false, true, false, true, false, true}));
  stepped["mlp_only_layers"] = {1, 4, 99};  // one beyond the last layer says nothing
  EXPECT_EQ(experts_of(stepped, read_qwen_experts),
            (std::vector<bool>{false, false, false, true, false, true}));
  stepped["mlp_only_layers"] = 1;
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"mlp_only_layers is not a list"},
                    [&] { experts_of(stepped, read_qwen_experts); }));
}

TEST(ReadQwenExperts, TakeTheNameOfTransformers5) {
  const json object{
      {"num_local_experts", 4}, {"moe_intermediate_size", 16}, {"norm_topk_prob", true}};
  TransformerConfig config{.num_layers = 2};
  read_qwen_experts(ConfigFields(object, "config.json"), config);
  EXPECT_EQ(config.num_moe_experts, 4);
  EXPECT_FALSE(config.moe_router_pre_softmax);
}

TEST(ReadLinearBiases, RefuseOneWithoutTheOther) {
  TransformerConfig config;
  const json both{{"attention_bias", true}, {"mlp_bias", true}};
  read_linear_biases(ConfigFields(both, "config.json"), config);
  EXPECT_TRUE(config.add_bias_linear);
  for (const auto* alone : {"attention_bias", "mlp_bias"}) {
    const json one{{alone, true}};
    EXPECT_TRUE(fails(ErrorKind::kLayout, {alone, "no counterpart"},
                      [&] { read_linear_biases(ConfigFields(one, "config.json"), config); }));
  }
}

TEST(ReadDeepseekExperts, ReadGroupsAndSharedExperts) {
  const json object{{"n_routed_experts", 8},
                    {"moe_intermediate_size", 24},
                    {"n_shared_experts", 2},
                    {"num_experts_per_tok", 3},
                    {"n_group", 4},
                    {"topk_group", 2},
                    {"routed_scaling_factor", 2.5},
                    {"first_k_dense_replace", 1}};
  TransformerConfig config{.num_layers = 2};
  read_deepseek_experts(ConfigFields(object, "config.json"), config);
  EXPECT_EQ(config.moe_shared_expert_intermediate_size, 48);
  EXPECT_EQ(config.moe_router_num_groups, 4);
  EXPECT_EQ(config.moe_router_group_topk, 2);
  EXPECT_EQ(config.moe_router_topk_scaling_factor, 2.5);
  EXPECT_TRUE(config.moe_router_pre_softmax);
  auto one_group = object;
  one_group["n_group"] = 1;
  TransformerConfig single{.num_layers = 2};
  read_deepseek_experts(ConfigFields(one_group, "config.json"), single);
  EXPECT_EQ(single.moe_router_num_groups, 0) << "one group is none";
}

// The tower is carried where its description is another one's.
TEST(ReadQwen3Vision, LeavesATowerInOtherWordsAlone) {
  const json other{{"vision_config", {{"depth", "deep"}}}, {"text_config", json::object()}};
  TransformerConfig config{.num_layers = 2};
  read_qwen3_vision(ConfigFields(other, "config.json"), config);
  EXPECT_FALSE(config.vision.has_value());
  const json known{{"vision_config", {{"depth", 3}, {"deepstack_visual_indexes", {0, 2}}}},
                   {"text_config", {{"rope_scaling", {{"mrope_section", {8, 4, 4}}}}}}};
  read_qwen3_vision(ConfigFields(known, "config.json"), config);
  ASSERT_TRUE(config.vision.has_value());
  EXPECT_EQ(config.vision->depth, 3);
  EXPECT_EQ(config.vision->deepstack_visual_indexes, (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(config.mrope_section, (std::vector<std::int64_t>{8, 4, 4}));
}

}  // namespace config_fields_test
}  // namespace ferry::converter
