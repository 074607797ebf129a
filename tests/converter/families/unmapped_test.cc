#include "converter/families/unmapped.h"

#include <gtest/gtest.h>

#include "converter/families/config_limits.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace unmapped_test {

models::TransformerConfig mixtral() {
  return {.family = "mixtral",
          .num_layers = 2,
          .hidden_size = 8,
          .ffn_hidden_size = 16,
          .num_attention_heads = 4,
          .num_query_groups = 2,
          .kv_channels = 2,
          .vocab_size = 10,
          .num_moe_experts = 4,
          .moe_layer_freq = {true, true},
          .moe_ffn_hidden_size = 16,
          .moe_router_topk = 2};
}

std::string why(std::string_view name) {
  return why_unmapped(make_model_map(mixtral()), name);
}

TEST(WhyUnmapped, SaysHowManyExpertsThereAre) {
  const auto hint = why("model.layers.0.block_sparse_moe.experts.4.w1.weight");
  EXPECT_NE(hint.find("4 experts (num_local_experts)"), std::string::npos) << hint;
}

TEST(WhyUnmapped, SaysHowManyLayersThereAre) {
  const auto hint = why("model.layers.2.input_layernorm.weight");
  EXPECT_NE(hint.find("2 layers"), std::string::npos) << hint;
}

TEST(WhyUnmapped, SaysNothingOfATensorThatNoSettingGives) {
  EXPECT_EQ(why("model.layers.0.other.weight"), "");
  EXPECT_EQ(why("other.weight"), "");
}

TEST(WhyUnmapped, NamesTheHeadsThatAreRead) {
  for (const auto* name : {"v_head.summary.weight", "score.0.weight", "qa_outputs.bias"})
    EXPECT_NE(why(name).find("score.weight"), std::string::npos) << name;
}

TEST(RequireModerate, TakesTheLargestModelsThatAreKnown) {
  auto config = mixtral();
  config.num_layers = 61;
  config.num_moe_experts = 384;  // Kimi K2
  EXPECT_NO_THROW(require_moderate(config, "config.json"));
}

TEST(RequireModerate, RefusesMoreExpertsThanAreHandled) {
  auto config = mixtral();
  config.num_layers = 1 << 10;
  config.num_moe_experts = 1 << 10;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"config.json: 1024 layers of 1024 experts"},
                             [&] { require_moderate(config, "config.json"); }));
}

}  // namespace unmapped_test
}  // namespace ferry::converter
