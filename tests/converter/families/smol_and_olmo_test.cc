// SmolLM3, OLMo 2 and OLMo 3 as config.json and Megatron's arguments and tensors describe them.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "converter/families/families.h"
#include "converter/families/hf_config.h"
#include "converter/families/megatron_args.h"
#include "converter/open/megatron_opener.h"
#include "converter/optimizer/common_state.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace smol_and_olmo_test {

using distckpt::Pickle;
using distckpt::PickleWriter;
using models::TransformerConfig;
using support::fails;
using Layers = std::vector<bool>;

TransformerConfig parse(std::string_view model_type, std::string_view more = "") {
  return parse_hf_config(fmt::format(
                             R"({{"model_type": "{}", "hidden_size": 64, "intermediate_size": 96,
               "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100{}{}}})",
                             model_type, more.empty() ? "" : ", ", more),
                         "config.json");
}

// transformers, configuration_smollm3.py
TEST(SmolLM3, NamesTheLayersThatDoNotTurn) {
  EXPECT_EQ(parse("smollm3").no_rope_freq, (Layers{false, false, false, true}));
  EXPECT_EQ(parse("smollm3", R"("no_rope_layer_interval": 2)").no_rope_freq,
            (Layers{false, true, false, true}));
  const auto named = parse("smollm3", R"("no_rope_layers": [0, 1, 1, 0, 1])");
  EXPECT_EQ(named.no_rope_freq, (Layers{true, false, false, true}));
  EXPECT_FALSE(named.turns(0));
  EXPECT_TRUE(named.turns(1));
  EXPECT_TRUE(named.turns(4));  // a prediction layer's number
  EXPECT_TRUE(parse("smollm3", R"("no_rope_layers": [1, 1, 1, 1])").no_rope_freq.empty());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"no_rope_layers", "4 layers"},
                    [] { parse("smollm3", R"("no_rope_layers": [1, 1, 1])"); }));
}

TEST(SmolLM3, HasItsWindowInTheLayersThatDoNotTurn) {
  EXPECT_EQ(parse("smollm3", R"("sliding_window": 8)").sliding_window, std::nullopt);
  const auto used = parse("smollm3", R"("sliding_window": 8, "use_sliding_window": true)");
  EXPECT_EQ(used.window_of(3), 8);
  EXPECT_EQ(used.window_of(0), std::nullopt);
}

TEST(SmolLM3, TakesTheDefaultsOfItsClass) {
  const auto config = parse("smollm3");
  EXPECT_EQ(config.num_query_groups, 4);
  EXPECT_EQ(config.rotary_base, 2e6);
  EXPECT_FALSE(config.untie_embeddings_and_output_weights);
}

// transformers, configuration_olmo3.py: layers with a window turn by the default base alone.
TEST(Olmo3, ScalesPositionsInLayersWithoutAWindow) {
  const auto plain = parse("olmo3");
  EXPECT_EQ(plain.window_attn_skip_freq, (Layers{true, true, true, false}));
  EXPECT_EQ(plain.sliding_window, 4096);
  EXPECT_EQ(plain.rotary_base, 5e5);
  EXPECT_TRUE(plain.turns_locally(0));
  EXPECT_FALSE(plain.turns_locally(3));
  EXPECT_EQ(plain.rotary_base_local, std::nullopt);
  const auto old_style =
      parse("olmo3", R"("rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 8.0,
                        "original_max_position_embeddings": 16})");
  const auto new_style =
      parse("olmo3", R"("rope_parameters": {"sliding_attention": {"rope_type": "default"},
                  "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                                     "original_max_position_embeddings": 16}})");
  EXPECT_EQ(old_style, new_style);
  EXPECT_EQ(new_style.rope_scaling.type, models::RopeType::kYarn);
  EXPECT_EQ(new_style.rotary_base, 1e4);
  EXPECT_EQ(new_style.rotary_base_local, 5e5);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"sliding_attention", "rope_type is \"linear\""}, [] {
    parse("olmo3", R"("rope_parameters": {"full_attention": {"rope_type": "default"},
                                          "sliding_attention": {"rope_type": "linear"}})");
  }));
}

// The model that the arguments and tensors of a checkpoint describe without a config.json.
TransformerConfig told_back(const TransformerConfig& config) {
  static constexpr std::string_view kGlobals[] = {"argparse.Namespace"};
  PickleWriter pickle;
  write_common_state(pickle, config, {}, {}, std::nullopt);
  const auto common =
      Pickle::parse(pickle.finish(), {.source = "common.pt", .allowed_globals = kGlobals});
  auto read = read_args(common.root()).value();
  const std::string layer = "decoder.layers.";
  TensorOutline outline{
      {layer + "self_attention.q_layernorm.weight",
       {config.num_layers, config.num_attention_heads * config.kv_channels}},
      {layer + "post_self_attn_layernorm.weight", {config.num_layers, config.hidden_size}}};
  read_from_tensors(outline, read);
  return read;
}

TEST(Olmo, IsKnownByItsNorms) {
  for (const auto* name : {"hf_olmo2", "hf_olmo3"}) {
    SCOPED_TRACE(name);
    const auto path = support::test_data(name) / "hf/config.json";
    auto config = parse_hf_config(distckpt::read_text(path), path.string());
    const auto read = told_back(config);
    if (config.rope_scaling.type == models::RopeType::kYarn) {
      EXPECT_NEAR(read.rope_scaling.attention_factor.value(), 1.2, 1e-12);
      config.rope_scaling.attention_factor = read.rope_scaling.attention_factor;
      config.rope_scaling.truncate = true;  // as Megatron-Core takes it where nothing is said
    }
    EXPECT_EQ(read, config);
  }
}

}  // namespace smol_and_olmo_test
}  // namespace ferry::converter
