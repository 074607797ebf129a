#include "converter/adapter/factors/lora_settings.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace lora_settings_test {

using support::fails;
using support::TempDir;

// A LoraConfig of rank 4 and alpha 8 with these settings besides.
LoraSettings settings_of(const std::string& more = "") {
  const TempDir dir;
  distckpt::write_text(dir / "adapter_config.json",
                       R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8)" + more + "}");
  return LoraSettings(dir / "adapter_config.json");
}

TEST(LoraSettings, ScaleByAlphaOverRank) {
  EXPECT_EQ(settings_of().scaling("model.layers.0.mlp.up_proj", 4), 2.0F);
}

TEST(LoraSettings, ScaleByTheRootOfTheRankIfAsked) {
  EXPECT_EQ(settings_of(R"(, "use_rslora": true)").scaling("a.q_proj", 4), 4.0F);
}

TEST(LoraSettings, PatternsAreOfTheEndOfAName) {
  const auto settings = settings_of(
      R"(, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {".*\\.(0|1)\\.self_attn.q_proj": 16})");
  EXPECT_EQ(settings.scaling("model.layers.0.self_attn.q_proj", 2), 8.0F);
  EXPECT_EQ(settings.scaling("model.layers.2.self_attn.q_proj", 2), 4.0F);
  EXPECT_EQ(settings.scaling("model.layers.0.self_attn.xq_proj", 4), 2.0F);
}

TEST(LoraSettings, PatternsMayCount) {
  const auto settings = settings_of(R"(, "rank_pattern": {"layers\\.[0-9]{1,2}\\.up_proj": 2})");
  EXPECT_EQ(settings.scaling("model.layers.17.up_proj", 2), 4.0F);
  EXPECT_EQ(settings.scaling("model.layers.117.up_proj", 4), 2.0F);
}

TEST(LoraSettings, PatternsOfAParameterAreOfItsWholeName) {
  const auto settings = settings_of(
      R"(, "target_parameters": ["gate.weight"], "rank_pattern": {"gate": 2, "gate.weight": 1})");
  EXPECT_EQ(settings.scaling("model.layers.0.mlp.gate", 1), 8.0F);
  EXPECT_EQ(settings.scaling("model.layers.0.mlp.shared_gate", 4), 2.0F);
}

TEST(LoraSettings, RefuseFactorsOfAnotherRank) {
  const auto settings = settings_of();
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a.q_proj", "the rank is 4, its factors have 3"},
                    [&] { settings.scaling("a.q_proj", 3); }));
}

// Going back for each way to divide a name takes longer than the universe is old.
TEST(LoraSettings, PatternsEndInTimeLinearInTheName) {
  const auto settings = settings_of(R"(, "rank_pattern": {"(([a-z._0-9]+)+)+x": 2})");
  EXPECT_EQ(settings.scaling(std::string(10'000, 'a'), 4), 2.0F);
}

TEST(LoraSettings, RefusePatternsThatAreNotUnderstood) {
  const std::string patterns[] = {"(a",
                                  "(a)\\\\1",
                                  "a{1,3000}",
                                  "((a?){99}){99}",
                                  "a{99999999999999999999}",
                                  std::string(2001, 'a')};
  for (const auto& pattern : patterns) {
    const auto settings = settings_of(R"(, "alpha_pattern": {")" + pattern + R"(": 2})");
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"alpha_pattern", "no pattern that is understood"}, [&] {
      settings.scaling("a", 4);
    })) << pattern;
  }
}

TEST(LoraSettings, KeysAreThoseOfPeftAndOfMsSwift) {
  const auto settings = settings_of();
  for (const std::string_view name :
       {"base_model.model.lm.q_proj.lora_A.weight",
        "base_model.model.lm.q_proj.lora_A.default.weight", "base_model.model.lm.q_proj.lora_A"}) {
    const auto key = settings.parse_key(name, "file");
    EXPECT_EQ(key.module, "lm.q_proj") << name;
    EXPECT_EQ(key.part, "lora_A") << name;
    EXPECT_TRUE(key.is_factor()) << name;
  }
  EXPECT_FALSE(settings.parse_key("base_model.model.e.base_layer.weight", "file").is_factor());
}

TEST(LoraSettings, RefuseNamesThatAreNoFactors) {
  const auto settings = settings_of();
  for (const std::string& name :
       {std::string("model.q_proj.lora_A.weight"),
        std::string("base_model.model.q_proj.lora_C.weight"),
        std::string("base_model.model.lora_A.weight"), std::string("base_model.model..lora_A"),
        std::string("base_model.model.q_proj.lora_A.weight.weight"),
        "base_model.model." + std::string(1'000'000, 'a')})
    EXPECT_THROW(settings.parse_key(name, "file"), Error) << name.substr(0, 80);
}

TEST(LoraSettings, ATensorSavedWholeIsAModuleWithoutParts) {
  const auto settings = settings_of(R"(, "modules_to_save": ["lm_head"])");
  const auto key = settings.parse_key("base_model.model.lm_head.weight", "file");
  EXPECT_EQ(key.module, "lm_head.weight");
  EXPECT_EQ(key.part, "");
}

TEST(LoraSettings, TokensAreThoseOfTheEmbeddingOrOfAModuleByName) {
  constexpr std::string_view kKey =
      "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta";
  const auto settings = settings_of(R"(, "trainable_token_indices": [7, 3])");
  const auto key = settings.parse_key(kKey, "file");
  EXPECT_EQ(key.module, "model.embed_tokens");
  EXPECT_EQ(key.part, kTokenRows);
  EXPECT_EQ(settings.token_indices(key.module), (std::vector<std::int64_t>{7, 3}));
  const auto named = settings_of(R"(, "trainable_token_indices": {"lm_head": [5]})");
  EXPECT_EQ(named.token_indices("lm_head"), std::vector<std::int64_t>{5});
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"null is no list of tokens of model.embed_tokens"},
                    [&] { named.token_indices(key.module); }));
}

TEST(LoraSettings, RefuseAdaptersOfOtherKinds) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"fan_in_fan_out", "not handled"},
                    [] { settings_of(R"(, "fan_in_fan_out": true)"); }));
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"bias", "all"}, [] { settings_of(R"(, "bias": "all")"); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"peft_type", "LOHA"}, [] {
    const TempDir dir;
    distckpt::write_text(dir / "c.json", R"({"peft_type": "LOHA", "r": 4, "lora_alpha": 8})");
    LoraSettings(dir / "c.json");
  }));
}

TEST(LoraSettings, AFactorIsPositiveAndFinite) {
  EXPECT_EQ(lora_scaling(1, 8, "file"), 0.125F);
  for (const double alpha : {0.0, -1.0, 1e300, std::nan("")})
    EXPECT_THROW(lora_scaling(alpha, 8, "file"), Error) << alpha;
}

}  // namespace lora_settings_test
}  // namespace ferry::converter
