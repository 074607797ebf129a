// ERNIE 4.5 as config.json and its tensors describe it.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "converter/families/hf_config.h"
#include "converter/families/model_map.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace ernie_test {

using support::fails;
using Layers = std::vector<bool>;

models::TransformerConfig parse(std::string_view model_type, std::string_view more = "") {
  return parse_hf_config(fmt::format(
                             R"({{"model_type": "{}", "hidden_size": 64, "intermediate_size": 96,
               "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100{}{}}})",
                             model_type, more.empty() ? "" : ", ", more),
                         "config.json");
}

// transformers, configuration_ernie4_5.py
TEST(Ernie, TakesTheDefaultsOfItsClass) {
  const auto config = parse("ernie4_5");
  EXPECT_TRUE(config.rotary_interleaved);
  EXPECT_EQ(config.num_query_groups, 2);
  EXPECT_EQ(config.rotary_base, 5e5);
  EXPECT_FALSE(config.untie_embeddings_and_output_weights);
  EXPECT_FALSE(config.add_bias_linear);
  EXPECT_TRUE(parse("ernie4_5", R"("use_bias": true)").add_bias_linear);
}

TEST(ErnieMoe, HasExpertsInTheLayersThatItsIntervalNames) {
  EXPECT_EQ(parse("ernie4_5_moe").moe_layer_freq, (Layers{false, true, true, true}));
  EXPECT_EQ(parse("ernie4_5_moe", R"("moe_layer_start_index": 0, "moe_layer_interval": 2)")
                .moe_layer_freq,
            (Layers{false, true, false, true}));
  EXPECT_EQ(parse("ernie4_5_moe", R"("moe_layer_end_index": 2)").moe_layer_freq,
            (Layers{false, true, true, false}));
}

TEST(ErnieMoe, HasSharedExpertsOfTheSizeOfOthers) {
  const auto config =
      parse("ernie4_5_moe", R"("moe_num_shared_experts": 3, "moe_intermediate_size": 32)");
  EXPECT_EQ(config.moe_ffn_hidden_size, 32);
  EXPECT_EQ(config.moe_shared_expert_intermediate_size, 96);
}

TEST(ErnieMoe, RefusesBiases) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"use_bias is true"},
                    [] { parse("ernie4_5_moe", R"("use_bias": true)"); }));
}

TEST(ErnieMoe, HoldsTheBiasOfARouterAsARow) {
  const auto map = make_model_map(parse("ernie4_5_moe", R"("moe_num_experts": 8)"));
  const auto name = "model.layers.1.mlp.moe_statics.e_score_correction_bias";
  EXPECT_EQ(map.tensors[map.index.at(name)].shape, (distckpt::Shape{1, 8}));
}

}  // namespace ernie_test
}  // namespace ferry::converter
