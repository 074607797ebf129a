#include "converter/families/hf_config.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "converter/families/families.h"
#include "converter/families/quantization.h"
#include "distckpt/base/json.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace hf_config_test {

using support::fails;

// A small Llama's config.json with further members.
std::string config(std::string_view more = "", std::string_view model_type = "llama") {
  return fmt::format(
      R"({{"model_type": "{}", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 100{}{}}})",
      model_type, more.empty() ? "" : ", ", more);
}

models::TransformerConfig parse(std::string_view more = "", std::string_view model_type = "llama") {
  return parse_hf_config(config(more, model_type), "config.json");
}

std::string without(std::string_view more, std::string_view model_type) {
  const auto text = without_prediction_layers(config(more, model_type), "config.json");
  const auto object = distckpt::parse_json(text, "config.json");
  std::string said;
  for (const auto* key :
       {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "use_mtp"}) {
    if (object.contains(key)) said += fmt::format("{}: {}\n", key, object[key].dump());
  }
  return said;
}

TEST(WithoutPredictionLayers, SaysSoUnderTheNameThatTheFamilyReads) {
  EXPECT_EQ(without("", "glm4_moe"), "num_nextn_predict_layers: 0\n");
  EXPECT_EQ(without("", "qwen3_next"), "num_nextn_predict_layers: 0\n");
  EXPECT_EQ(without("", "qwen3_5_text"), "mtp_num_hidden_layers: 0\n");
  EXPECT_EQ(without(R"("mtp_num_hidden_layers": 1)", "qwen3_5_text"), "mtp_num_hidden_layers: 0\n");
  EXPECT_EQ(without(R"("mtp_num_hidden_layers": 1)", "qwen3_next"), "mtp_num_hidden_layers: 0\n");
  EXPECT_EQ(
      without(R"("mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1)", "qwen3_5_moe_text"),
      "num_nextn_predict_layers: 0\nmtp_num_hidden_layers: 0\n");
  EXPECT_EQ(without(R"("use_mtp": true, "num_mtp_modules": 3)", "minimax_m2"),
            "num_mtp_modules: 0\nuse_mtp: false\n");
  EXPECT_EQ(without("", "llama"), "");
}

TEST(WithoutPredictionLayers, SaysSoInTheDescriptionOfTheLanguageModel) {
  const auto* const text = R"({"model_type": "qwen3_5",
                               "text_config": {"mtp_num_hidden_layers": 1}, "dtype": "bfloat16"})";
  const auto object = distckpt::parse_json(without_prediction_layers(text, "config.json"), "it");
  EXPECT_EQ(object["text_config"]["mtp_num_hidden_layers"], 0);
  EXPECT_EQ(object.size(), 3U);
}

TEST(NamedPredictionLayers, CountsThoseThatHaveNoCounterparts) {
  const auto named = [](std::string_view more, std::string_view model_type) {
    return named_prediction_layers(config(more, model_type), "config.json");
  };
  EXPECT_EQ(named(R"("num_nextn_predict_layers": 1)", "ernie4_5_moe"), 1);
  EXPECT_EQ(named(R"("use_mtp": true, "num_mtp_modules": 3)", "minimax_m2"), 3);
  EXPECT_EQ(named(R"("use_mtp": false, "num_mtp_modules": 3)", "minimax_m2"), 0);
  EXPECT_EQ(named("", "qwen3_next"), 1);
  EXPECT_EQ(named(R"("num_nextn_predict_layers": 1)", "deepseek_v4"), 0);
}

TEST(HfConfig, ReadsBothSpellingsOfRope) {
  const auto old_style = parse(
      R"("rope_theta": 500000.0, "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})");
  const auto new_style = parse(
      R"("rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})");
  EXPECT_EQ(old_style, new_style);
  EXPECT_EQ(new_style.rotary_base, 500000.0);
  EXPECT_EQ(new_style.rope_scaling.type, models::RopeType::kLlama3);
  EXPECT_EQ(new_style.rope_scaling.original_max_position_embeddings, 8192);
}

// Qwen2.5-VL of the hub, saved again by transformers 5.
TEST(HfConfig, TakesTheNewerNameOfARopeThatHasTwo) {
  EXPECT_EQ(parse(R"("rope_scaling": {"rope_type": "default", "type": "mrope"})", "qwen2_5_vl")
                .rope_scaling,
            models::RopeScaling{});
}

// transformers, modeling_rope_utils.py
TEST(HfConfig, FillsInWhatARopeDoesNotSay) {
  const auto rope = [](std::string_view type, std::string_view more) {
    return parse(fmt::format(R"("max_position_embeddings": 4096,
                                "rope_scaling": {{"rope_type": "{}"{}}})",
                             type, more))
        .rope_scaling;
  };
  EXPECT_EQ(rope("yarn", R"(, "factor": 4.0)").original_max_position_embeddings, 4096);
  EXPECT_EQ(rope("llama3", R"(, "factor": 4.0)").original_max_position_embeddings, 4096);
  EXPECT_EQ(rope("yarn", R"(, "factor": null, "original_max_position_embeddings": 1024)").factor,
            4);
  EXPECT_EQ(rope("linear", R"(, "factor": 4.0)").original_max_position_embeddings, std::nullopt);
}

// transformers, configuration_phi3.py
TEST(HfConfig, TakesThreeNamesOfLongropeFromAPhi) {
  const auto rope = [](std::string_view type, std::string_view family) {
    return parse(fmt::format(R"("max_position_embeddings": 16384, "rope_scaling": {{
                                "type": "{}", "short_factor": [1, 1.5], "long_factor": [2, 3]}})",
                             type),
                 family)
        .rope_scaling;
  };
  const auto longrope = rope("longrope", "phi3");
  EXPECT_EQ(longrope.type, models::RopeType::kLongrope);
  EXPECT_EQ(longrope.original_max_position_embeddings, 4096);
  EXPECT_EQ(longrope.factor, 4);
  EXPECT_EQ(longrope.short_factor, (std::vector<double>{1, 1.5}));
  EXPECT_EQ(longrope.long_factor, (std::vector<double>{2, 3}));
  EXPECT_EQ(rope("su", "phi3"), longrope);
  EXPECT_EQ(rope("yarn", "phi3"), longrope);
  EXPECT_EQ(rope("yarn", "llama").type, models::RopeType::kYarn);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"long_factor", "not a list of numbers"}, [] {
    parse(R"("rope_scaling": {"type": "longrope", "long_factor": ["2"]})", "phi3");
  }));
}

TEST(HfConfig, TakesNoMoreTokensForGenerationThanTurnByTheShortFactors) {
  const auto* const lengths = R"("max_position_embeddings": 16384)";
  EXPECT_EQ(parse(lengths, "phi3").max_generated_positions(), 16384);
  const auto scaled = fmt::format(R"({}, "rope_scaling": {{"type": "longrope"}})", lengths);
  EXPECT_EQ(parse(scaled, "phi3").max_generated_positions(), 4096);
}

TEST(HfConfig, ReadsTheFactorsOfAGranite) {
  const auto unsaid = parse("", "granite");
  EXPECT_EQ(unsaid.embedding_multiplier, 1);
  EXPECT_EQ(unsaid.softmax_scale, 1);
  EXPECT_EQ(unsaid.residual_multiplier, 1);
  EXPECT_EQ(unsaid.logits_scaling, 1);
  const auto said = parse(R"("embedding_multiplier": 12, "attention_multiplier": 0.0078125,
                             "residual_multiplier": 0.22, "logits_scaling": 16.0)",
                          "granite");
  EXPECT_EQ(said.embedding_multiplier, 12);
  EXPECT_EQ(said.softmax_scale, 0.0078125);
  EXPECT_EQ(said.residual_multiplier, 0.22);
  EXPECT_EQ(said.logits_scaling, 16);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"logits_scaling is 0"},
                    [] { parse(R"("logits_scaling": 0)", "granite"); }));
}

TEST(HfConfig, TakesTheDefaultsOfTheClass) {
  EXPECT_EQ(parse().layernorm_epsilon, 1e-6);
  EXPECT_EQ(parse("", "qwen2_5_vl").layernorm_epsilon, 1e-5);
  EXPECT_EQ(parse("", "qwen3_vl").rotary_base, 5e5);
  const auto* const experts = R"("num_local_experts": 4)";
  EXPECT_EQ(parse(experts, "mixtral").layernorm_epsilon, 1e-5);
  EXPECT_EQ(parse(experts, "mixtral").rotary_base, 1e6);
  EXPECT_EQ(parse("", "glm4").layernorm_epsilon, 1.5625e-07);
  EXPECT_EQ(parse("", "mistral").sliding_window, 4096);
  EXPECT_EQ(parse(R"("sliding_window": null)", "mistral").sliding_window, std::nullopt);
  EXPECT_EQ(parse(experts, "gpt_oss").sliding_window, 128);
  EXPECT_EQ(parse(R"("num_local_experts": 4, "sliding_window": null)", "gpt_oss").sliding_window,
            std::nullopt);
}

TEST(HfConfig, TellsWhichLayersOfAMistralHaveItsWindow) {
  const auto* const layers =
      R"("sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"])";
  for (const auto* type : {"mistral", "ministral"}) {
    EXPECT_EQ(parse(layers, type).window_attn_skip_freq, (std::vector<bool>{false, true})) << type;
    EXPECT_TRUE(parse(R"("sliding_window": 6)", type).window_attn_skip_freq.empty()) << type;
  }
  EXPECT_TRUE(parse(layers, "ministral3").window_attn_skip_freq.empty());  // its class reads none
}

TEST(HfConfig, IgnoresWhatTheClassOfAFamilyDoesNotRead) {
  EXPECT_EQ(parse(R"("use_sliding_window": true, "sliding_window": 6, "max_window_layers": 0)",
                  "qwen3_vl")
                .sliding_window,
            std::nullopt);
  const auto* const cap = R"("final_logit_softcapping": 30.0)";
  EXPECT_EQ(parse(cap, "gemma3_text").final_logit_softcapping, 30);
  EXPECT_EQ(parse(cap, "gemma3").final_logit_softcapping, std::nullopt);
  const auto* const experts = R"("norm_topk_prob": false, "mlp_only_layers": [0], "num_experts": 4,
                                 "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8)";
  EXPECT_TRUE(parse(experts, "qwen3_next").moe_router_pre_softmax);
  EXPECT_EQ(parse(experts, "qwen3_next").moe_layer_freq, (std::vector<bool>{false, true}));
  EXPECT_FALSE(parse(experts, "qwen3_5_moe").moe_router_pre_softmax);
  EXPECT_EQ(parse(experts, "qwen3_5_moe").moe_layer_freq, (std::vector<bool>{true, true}));
}

// transformers 4.52 to 4.57 moved the flag there when they saved.
TEST(HfConfig, ReadsTheTiesOfQwen25VlInItsTextConfig) {
  const auto tied = [](std::string_view model_type) {
    const auto text = fmt::format(R"({{"model_type": "{}", "text_config": {{"hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
        "tie_word_embeddings": true}}}})",
                                  model_type);
    return !parse_hf_config(text, "config.json").untie_embeddings_and_output_weights;
  };
  EXPECT_TRUE(tied("qwen2_5_vl"));
  EXPECT_FALSE(tied("qwen3_vl"));
}

TEST(HfConfig, TakesGroupsOfExpertsOfDeepSeekV2ForOneMethodAlone) {
  const auto groups = [](std::string_view method) {
    return parse(fmt::format(R"("kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                                "v_head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 8,
                                "n_group": 2, "topk_group": 1{})",
                             method),
                 "deepseek_v2")
        .moe_router_num_groups;
  };
  EXPECT_EQ(groups(R"(, "topk_method": "group_limited_greedy")"), 2);
  EXPECT_EQ(groups(R"(, "topk_method": "greedy")"), 0);
  EXPECT_EQ(groups(""), 0);
}

// 8 groups of which 4 count, unless config.json says otherwise.
TEST(HfConfig, RefusesGroupsThatTheExpertsOfDeepSeekV3DoNotFill) {
  const auto of = [](int experts, std::string_view more) {
    return parse(fmt::format(R"("q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
                                "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": {},
                                "first_k_dense_replace": 0, "moe_intermediate_size": 8{})",
                             experts, more),
                 "deepseek_v3");
  };
  EXPECT_EQ(of(16, "").moe_router_num_groups, 8);
  EXPECT_EQ(of(4, R"(, "n_group": 2, "topk_group": 1)").moe_router_num_groups, 2);
  for (const auto& [experts, more] : {std::pair{8, ""}, std::pair{4, ""}, std::pair{18, ""},
                                      std::pair{16, R"(, "n_group": 2, "topk_group": 3)"}})
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"n_group", "experts"}, [&] { of(experts, more); }))
        << experts << more;
}

TEST(HfConfig, RefusesTwoRopesThatDiffer) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"rope_theta"}, [] {
    parse(
        R"("rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0})");
  }));
}

TEST(HfConfig, KnowsWhatEachFamilyAdds) {
  EXPECT_FALSE(parse().has_qkv_bias());
  EXPECT_TRUE(parse("", "qwen2").add_qkv_bias);
  EXPECT_TRUE(parse(R"("head_dim": 32)", "qwen3").qk_layernorm);
  EXPECT_EQ(parse(R"("head_dim": 32)", "qwen3").kv_channels, 32);
  EXPECT_EQ(parse(R"("head_dim": null)").kv_channels, 16);
  EXPECT_EQ(parse(R"("sliding_window": 4096)", "mistral").sliding_window, 4096);
  EXPECT_EQ(parse(R"("sliding_window": 4096)", "qwen2").sliding_window,
            std::nullopt);  // not used unless told to
  EXPECT_TRUE(parse(R"("attention_bias": true, "mlp_bias": true)").add_bias_linear);
  EXPECT_FALSE(parse(R"("tie_word_embeddings": true)").untie_embeddings_and_output_weights);
}

TEST(HfConfig, LeavesTheWindowOfQwenToTheLayersThatHaveIt) {
  const auto with = [](std::string_view more, std::string_view model_type) {
    return parse(fmt::format(
                     R"("use_sliding_window": true, "sliding_window": 6, "moe_intermediate_size": 8,
               "num_experts": 4, "shared_expert_intermediate_size": 8{}{})",
                     more.empty() ? "" : ", ", more),
                 model_type);
  };
  const std::vector<bool> first{true, false}, second{false, true}, all{};
  for (const auto* type : {"qwen2", "qwen3", "qwen2_5_vl"}) {
    const auto some = with(R"("max_window_layers": 1)", type);
    EXPECT_EQ(some.sliding_window, 6) << type;
    EXPECT_EQ(some.window_attn_skip_freq, second) << type;
    EXPECT_EQ(with(R"("max_window_layers": 0)", type).sliding_window, 6) << type;
    EXPECT_EQ(with(R"("max_window_layers": 0)", type).window_attn_skip_freq, all) << type;
    EXPECT_EQ(with("", type).sliding_window, std::nullopt) << type;  // from layer 28 or 80 on
  }
  EXPECT_EQ(with("", "qwen2_moe").window_attn_skip_freq, first);
  EXPECT_EQ(with(R"("max_window_layers": 0)", "qwen2_moe").sliding_window, std::nullopt);
  const auto* const listed = R"("max_window_layers": 0,
                                "layer_types": ["full_attention", "sliding_attention"])";
  for (const auto* type : {"qwen2", "qwen3", "qwen2_moe"})
    EXPECT_EQ(with(listed, type).window_attn_skip_freq, second) << type;
  // Its class reads neither.
  EXPECT_EQ(with(listed, "qwen3_moe").sliding_window, 6);
  EXPECT_EQ(with(listed, "qwen3_moe").window_attn_skip_freq, all);
}

TEST(HfConfig, KeepsTheScaleOfQueriesWithoutThatOfPositions) {
  const auto ministral = [](std::string_view more) {
    return parse(fmt::format(R"("rope_parameters": {{"rope_type": "default",
                                "original_max_position_embeddings": 16{}}})",
                             more),
                 "ministral3")
        .rope_scaling;
  };
  const auto scaled = ministral(R"(, "llama_4_scaling_beta": 0.5)");
  EXPECT_EQ(scaled.type, models::RopeType::kDefault);
  EXPECT_EQ(scaled.llama_4_scaling_beta, 0.5);
  EXPECT_EQ(scaled.original_max_position_embeddings, 16);
  EXPECT_EQ(ministral(""), models::RopeScaling{});
}

TEST(HfConfig, RefusesWhatDeepSeekV3DoesNotCompute) {
  const auto latent = [](std::string_view more, std::string_view model_type) {
    return parse(fmt::format(R"("kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                                "v_head_dim": 8, "n_routed_experts": 4, "index_n_heads": 2,
                                "index_head_dim": 8, "index_topk": 4,
                                "moe_intermediate_size": 8, {})",
                             more),
                 model_type);
  };
  for (const auto* type : {"deepseek_v3", "kimi_k2", "glm4_moe_lite"}) {
    for (const auto* key : {"norm_topk_prob", "rope_interleave"}) {
      EXPECT_TRUE(fails(ErrorKind::kLayout, {key, "is false"}, [&] {
        latent(fmt::format("\"{}\": false", key), type);
      })) << type;
      EXPECT_NO_THROW(latent(fmt::format("\"{}\": true", key), type)) << type;
    }
  }
  EXPECT_NO_THROW(latent(R"("norm_topk_prob": false)", "deepseek_v2"));
  EXPECT_NO_THROW(latent(R"("rope_interleave": false)", "deepseek_v32"));  // not read there
}

TEST(HfConfig, KeepsTheNameOfAModelThatIsNotKnown) {
  const auto config = parse(R"("hidden_act": "of its own")", "gpt9");
  EXPECT_EQ(config.family, "gpt9");
  EXPECT_TRUE(family_of(config.family).passes_through);
}

// Ling 2 is published with the model_type of Ling 1.
TEST(HfConfig, TellsLing2FromLing1ByItsClass) {
  const std::string_view experts = R"("num_experts": 8, "moe_intermediate_size": 16)";
  const auto parse_class = [&](std::string_view name) {
    return parse(fmt::format(R"({}, "architectures": ["{}"])", experts, name), "bailing_moe");
  };
  const auto ling = parse_class("BailingMoeV2ForCausalLM");
  EXPECT_EQ(ling.family, "bailing_moe_v2");
  EXPECT_EQ(ling, parse(experts, "bailing_moe_v2"));
  EXPECT_EQ(parse_class("BailingMoeForCausalLM").family, "bailing_moe");
  EXPECT_EQ(parse(experts, "bailing_moe").family, "bailing_moe");
}

TEST(HfConfig, RefusesWhatItDoesNotUnderstand) {
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"quantised"}, [] { parse(R"("quantization_config": {})"); }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"hidden_act"}, [] { parse(R"("hidden_act": "gelu")"); }));
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"attention_bias"}, [] { parse(R"("attention_bias": true)"); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"\"hidden_size\" occurs twice"},
                    [] { parse(R"("hidden_size": 64)"); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"head_dim is -1"}, [] { parse(R"("head_dim": -1)"); }));
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"rms_norm_eps"}, [] { parse(R"("rms_norm_eps": "small")"); }));
}

TEST(HfConfig, NamesTheValuesThatASettingMayHave) {
  EXPECT_TRUE(fails(
      ErrorKind::kLayout,
      {"config.json: rope_parameters: rope_type is \"ntk\", which is none of default, linear, "
       "dynamic, yarn, longrope, llama3, proportional"},
      [] { parse(R"("rope_parameters": {"rope_type": "ntk"})"); }));
  const auto experts = [](const std::string& function) {
    return parse(R"("kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 8,
                    "scoring_func": ")" +
                     function + "\"",
                 "deepseek_v3");
  };
  EXPECT_NO_THROW((void)experts("sigmoid"));
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"config.json: scoring_func is \"softmax\", only \"sigmoid\" is handled"},
                    [&] { experts("softmax"); }));
}

TEST(HfConfig, SaysWhyATowerIsNotComputed) {
  const auto tower = [](const std::string& more) {
    return parse_hf_config(R"({"model_type": "qwen3_vl", "vision_config": {)" + more +
                               R"(}, "text_config": )" + config() + "}",
                           "config.json")
        .vision.value()
        .problem;
  };
  EXPECT_EQ(tower(""), "");
  EXPECT_EQ(tower(R"("hidden_act": "gelu")"),
            "config.json: vision_config: hidden_act is \"gelu\", only \"gelu_pytorch_tanh\" is "
            "computed");
}

TEST(HfConfig, RefusesModelsThatNoMachineHolds) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json", "num_hidden_layers is 65537"}, [] {
    parse_hf_config(R"({"model_type": "llama", "num_hidden_layers": 65537})", "config.json");
  }));
  const auto mixtral = [](int num_layers) {
    return parse_hf_config(
        fmt::format(
            R"({{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": {},
                 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
                 "num_local_experts": 65536}})",
            num_layers),
        "config.json");
  };
  EXPECT_EQ(mixtral(2).num_moe_experts, 65536);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"config.json: 3 layers of 65536 experts are more"},
                    [&] { mixtral(3); }));
}

TEST(HfConfig, RefusesBlocksThatAreNone) {
  const auto blocks = [](std::string_view sizes) {
    return parse_quantization(
        fmt::format(
            R"({{"quantization_config": {{"quant_method": "fp8", "weight_block_size": {}}}}})",
            sizes),
        "config.json");
  };
  EXPECT_EQ(blocks("[128, 64]")->block, (distckpt::Dims{128, 64}));
  for (const auto* sizes : {"[0, 128]", "[-1, 128]", "[128]", "[128, 128, 128]", "128",
                            "[9223372036854775807, 128]", "[1.5, 2]"}) {
    EXPECT_TRUE(
        fails(ErrorKind::kCorrupt, {"config.json", "weight_block_size"}, [&] { blocks(sizes); }));
  }
}

TEST(HfConfig, MindsNoQuantizationOfWeightsThatPassThrough) {
  const auto text = [](std::string_view model_type) {
    return fmt::format(
        R"({{"model_type": "{}", "quantization_config": {{"quant_method": "another"}}}})",
        model_type);
  };
  EXPECT_EQ(parse_quantization(text("deepseek_v4"), "config.json"), std::nullopt);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"the weights are quantised by \"another\""},
                    [&] { parse_quantization(text("deepseek_v3"), "config.json"); }));
}

TEST(HfConfig, ChangesItsDtypeAndNothingElse) {
  const std::string before =
      "{\n  \"b\": 1.50,\n  \"dtype\": \"bfloat16\",\n  \"a\": [\n    1\n  ]\n}\n";
  const std::string after =
      "{\n  \"b\": 1.5,\n  \"dtype\": \"float16\",\n  \"a\": [\n    1\n  ]\n}\n";
  EXPECT_EQ(with_dtype(before, distckpt::DType::kF16, "config.json"), after);
}

// The architecture of a critic whose language model has this one.
std::string critic_of(std::string_view architecture, std::string_view model_type) {
  const auto text =
      config(architecture.empty() ? "" : fmt::format(R"("architectures": ["{}"])", architecture),
             model_type);
  auto critic = parse_hf_config(text, "config.json");
  critic.head = models::Head::kTokenClassification;
  critic.num_labels = 1;
  const auto written = with_classification_head(text, critic, "config.json");
  EXPECT_EQ(parse_hf_config(written, "config.json"), critic);
  return distckpt::parse_json(written, "config.json")["architectures"][0];
}

TEST(HfConfig, NamesACriticAfterTheClassOfItsLanguageModel) {
  EXPECT_EQ(critic_of("Qwen3ForCausalLM", "qwen3"), "Qwen3ForTokenClassification");
  EXPECT_EQ(critic_of("Qwen3VLForConditionalGeneration", "llama"), "Qwen3VLForTokenClassification");
  EXPECT_EQ(critic_of("", "seed_oss"), "SeedOssForTokenClassification");
}

TEST(HfConfig, KnowsTheClassesThatTransformersLacks) {
  const auto text = config(R"("architectures": ["Qwen3VLForTokenClassification"])");
  auto critic = parse_hf_config(text, "config.json");
  EXPECT_EQ(class_that_transformers_lacks(critic, text, "config.json"), std::nullopt);
  critic.family = "qwen3_vl";
  EXPECT_EQ(class_that_transformers_lacks(critic, text, "config.json"),
            "Qwen3VLForTokenClassification");
  critic.head = models::Head::kSequenceClassification;
  EXPECT_EQ(class_that_transformers_lacks(critic, text, "config.json"),
            "Qwen3VLForSequenceClassification");
  critic.head = models::Head::kLanguageModel;
  EXPECT_EQ(class_that_transformers_lacks(critic, text, "config.json"), std::nullopt);
}

}  // namespace hf_config_test
}  // namespace ferry::converter
