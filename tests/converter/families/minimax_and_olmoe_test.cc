// MiniMax-M2 and OLMoE as config.json and their tensors describe them.
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "converter/families/hf_config.h"
#include "converter/families/model_map.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace minimax_and_olmoe_test {

using support::fails;

models::TransformerConfig parse(std::string_view model_type, std::string_view more = "") {
  return parse_hf_config(fmt::format(
                             R"({{"model_type": "{}", "hidden_size": 64, "intermediate_size": 96,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
               "head_dim": 16, "num_local_experts": 8, "vocab_size": 100{}{}}})",
                             model_type, more.empty() ? "" : ", ", more),
                         "config.json");
}

distckpt::Shape shape_of(const models::TransformerConfig& config, const std::string& name) {
  const auto map = make_model_map(config);
  return map.tensors[map.index.at(name)].shape;
}

TEST(MiniMaxM2, TurnsAPartOfItsHeads) {
  EXPECT_EQ(parse("minimax_m2").rotary_percent, 1);
  EXPECT_EQ(parse("minimax_m2", R"("rotary_dim": 4)").rotary_percent, 0.25);
  EXPECT_EQ(parse("minimax_m2", R"("rotary_dim": 4, "partial_rotary_factor": 0.5)").rotary_percent,
            0.5);
}

TEST(MiniMaxM2, HasMixtralsExpertsBehindASigmoidWithABias) {
  const auto config = parse("minimax_m2");
  EXPECT_EQ(config.moe_router_score_function, models::ScoreFunction::kSigmoid);
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(shape_of(config, layer + "block_sparse_moe.experts.7.w2.weight"),
            (distckpt::Shape{64, 96}));
  EXPECT_EQ(shape_of(config, layer + "block_sparse_moe.e_score_correction_bias"),
            distckpt::Shape{8});
  // Over all heads.
  EXPECT_EQ(shape_of(config, layer + "self_attn.q_norm.weight"), distckpt::Shape{64});
  EXPECT_EQ(shape_of(config, layer + "self_attn.k_norm.weight"), distckpt::Shape{32});
}

TEST(MiniMaxM2, IsToldFromMiniMaxText01ByItsClass) {
  const std::string_view first = R"("architectures": ["MiniMaxM2ForCausalLM"])";
  EXPECT_EQ(parse("minimax", first), parse("minimax_m2"));
  EXPECT_EQ(parse("minimax").family, "minimax");
}

TEST(MiniMaxM2, RefusesSettingsOfOtherModels) {
  const auto refuses = [](std::string_view setting, std::string_view why) {
    return fails(ErrorKind::kLayout, {why}, [&] { parse("minimax_m2", setting); });
  };
  EXPECT_TRUE(refuses(R"("use_qk_norm": false)", "use_qk_norm is false"));
  EXPECT_TRUE(refuses(R"("use_routing_bias": false)", "use_routing_bias is false"));
  EXPECT_TRUE(refuses(R"("shared_intermediate_size": 32)", "shared_intermediate_size is not 0"));
  EXPECT_TRUE(refuses(R"("scoring_func": "softmax")", "scoring_func is \"softmax\""));
}

TEST(Olmoe, ChoosesAmongTheProbabilitiesOfAllExpertsUnlessTheyAreNormed) {
  EXPECT_TRUE(parse("olmoe").moe_router_pre_softmax);
  EXPECT_FALSE(parse("olmoe", R"("norm_topk_prob": true)").moe_router_pre_softmax);
}

TEST(Olmoe, HasExpertsInEveryLayerAndNormsOverAllHeads) {
  const auto config = parse("olmoe", R"("num_experts": 4)");
  for (const auto* layer : {"model.layers.0.", "model.layers.1."}) {
    EXPECT_EQ(shape_of(config, std::string(layer) + "mlp.experts.3.up_proj.weight"),
              (distckpt::Shape{96, 64}));
    EXPECT_EQ(shape_of(config, std::string(layer) + "self_attn.q_norm.weight"),
              distckpt::Shape{64});
  }
}

TEST(Olmoe, RefusesClippedProjections) {
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"clip_qkv is set"}, [] { parse("olmoe", R"("clip_qkv": 8.0)"); }));
}

}  // namespace minimax_and_olmoe_test
}  // namespace ferry::converter
