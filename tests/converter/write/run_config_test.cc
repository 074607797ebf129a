// run_config.yaml: fields of Megatron-Bridge's providers out of Megatron-LM's arguments.
// tests/interop/convert has it read by Megatron-Bridge.
#include "converter/write/run_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "converter/convert.h"
#include "converter/families/families.h"
#include "converter/families/megatron_args.h"
#include "converter/optimizer/common_state.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace run_config_test {

namespace fs = std::filesystem;
using models::TransformerConfig;
using support::fails;

TransformerConfig config_of(const support::TinyModel& model) {
  const support::TempDir dir;
  support::write_tiny_model(model, dir.path(), 1);
  return open(dir.path()).map.config;
}

std::string text_of(const TransformerConfig& config,
                    const models::ParallelConfig& parallel = {},
                    const std::string& hf_model_id = "",
                    const std::string& hf_config = "") {
  constexpr std::string_view kGlobals[] = {"argparse.Namespace"};
  distckpt::PickleWriter pickle;
  write_common_state(pickle, config, parallel, {}, std::nullopt);
  const auto common = distckpt::Pickle::parse(pickle.finish(),
                                              {.source = "common.pt", .allowed_globals = kGlobals});
  return run_config_text(find_args(common.root()).value(), config, hf_model_id, hf_config);
}

TransformerConfig config_of_gemma3() {
  auto config = config_of({.num_layers = 3});
  config.family = "gemma3_text";
  config.sliding_window = 16;
  config.window_attn_skip_freq = {true, true, false};
  config.rotary_base = 1e6;
  config.rotary_base_local = 1e4;
  config.softmax_scale = 0.25;
  config.activation = models::Activation::kGeluTanh;
  return config;
}

// The value of a field, as YAML; "none" where there is no such field.
std::string field(const std::string& text, const std::string& name) {
  const auto begin = text.find("\n  " + name + ": ");
  if (begin == std::string::npos) return "none";
  const auto value = begin + name.size() + 5;
  return text.substr(value, text.find('\n', value) - value);
}

TEST(RunConfig, HasTheShapesAndTheLayoutOfTheModel) {
  const auto text =
      text_of(config_of({}), {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2});
  EXPECT_TRUE(
      text.starts_with("model:\n  _target_: "
                       "\"megatron.bridge.models.gpt_provider.GPTModelProvider\"\n"));
  EXPECT_EQ(field(text, "num_layers"), "2");
  EXPECT_EQ(field(text, "hidden_size"), "16");
  EXPECT_EQ(field(text, "ffn_hidden_size"), "24");
  EXPECT_EQ(field(text, "num_query_groups"), "2");
  EXPECT_EQ(field(text, "tensor_model_parallel_size"), "2");
  EXPECT_EQ(field(text, "pipeline_model_parallel_size"), "2");
  EXPECT_EQ(field(text, "gated_linear_unit"), "true");
  EXPECT_EQ(field(text, "activation_func"),
            R"({"_target_": "torch.nn.functional.silu", "_call_": false})");
  EXPECT_EQ(field(text, "params_dtype"), R"({"_target_": "torch.bfloat16", "_call_": false})");
}

TEST(RunConfig, WritesNumbersThatYamlTakesForNumbers) {
  auto config = config_of({});
  config.layernorm_epsilon = 1e-5;
  EXPECT_EQ(field(text_of(config), "layernorm_epsilon"), "1.0e-05");
  config.layernorm_epsilon = 2.5e-7;
  EXPECT_EQ(field(text_of(config), "layernorm_epsilon"), "2.5e-07");
}

TEST(RunConfig, SaysWhetherTheEmbeddingIsTheHead) {
  EXPECT_EQ(field(text_of(config_of({})), "share_embeddings_and_output_weights"), "false");
  EXPECT_EQ(field(text_of(config_of({.family = "qwen2", .tied = true})),
                  "share_embeddings_and_output_weights"),
            "true");
}

TEST(RunConfig, OfExpertsSaysHowTokensReachThem) {
  const auto text = text_of(config_of({.family = "qwen3_moe"}));
  EXPECT_EQ(field(text, "num_moe_experts"), "4");
  EXPECT_EQ(field(text, "moe_token_dispatcher_type"), "\"alltoall\"");
  EXPECT_EQ(field(text_of(config_of({})), "moe_token_dispatcher_type"), "none");
}

TEST(RunConfig, OfLatentAttentionIsAnotherProviderWithItsOwnLayers) {
  const auto text = text_of(config_of({.family = "deepseek_v3", .q_lora = 8}));
  EXPECT_EQ(field(text, "kv_lora_rank"), "6");
  EXPECT_EQ(field(text, "q_lora_rank"), "8");
  EXPECT_NE(text.find("mla_provider.MLAModelProvider"), std::string::npos);
  EXPECT_NE(field(text, "transformer_layer_spec").find("get_gpt_decoder_block_spec"),
            std::string::npos);
  const auto plain = text_of(config_of({}));
  EXPECT_EQ(field(plain, "kv_lora_rank"), "none");
  EXPECT_EQ(field(plain, "transformer_layer_spec"), "none");
}

TEST(RunConfig, OfGemma3CountsItsLayersOfLocalAttention) {
  auto config = config_of_gemma3();
  config.rope_scaling = {.type = models::RopeType::kLinear, .factor = 8.0};
  const auto text = text_of(config);
  EXPECT_NE(text.find("models.gemma.gemma3_provider.Gemma3ModelProvider\""), std::string::npos);
  EXPECT_EQ(field(text, "interleaved_attn_pattern"), "[2, 1]");
  EXPECT_EQ(field(text, "window_size"), "16");
  EXPECT_EQ(field(text, "rotary_base"), "[10000.0, 1000000.0]");
  EXPECT_EQ(field(text, "rope_scaling_factor"), "8.0");
  EXPECT_EQ(field(text, "seq_len_interpolation_factor"), "null");  // of all layers
  EXPECT_EQ(field(text, "window_attn_skip_freq"), "none");
  EXPECT_EQ(field(text, "activation_func"),
            R"({"_target_": "megatron.core.activations.fast_gelu", "_call_": false})");
}

TEST(RunConfig, OfYarnHasItsFields) {
  auto config = config_of({});
  config.rope_scaling = {
      .type = models::RopeType::kYarn, .factor = 4.0, .original_max_position_embeddings = 32};
  auto text = text_of(config);
  EXPECT_EQ(field(text, "position_embedding_type"), "\"yarn\"");
  EXPECT_EQ(field(text, "yarn_rotary_scaling_factor"), "4.0");
  EXPECT_EQ(field(text, "yarn_original_max_position_embeddings"), "32");
  EXPECT_EQ(field(text, "yarn_correction_range_round_to_int"), "true");
  EXPECT_EQ(field(text, "yarn_mscale"), "null");
  config.rope_scaling.mscale = config.rope_scaling.mscale_all_dim = 0.5;
  config.rope_scaling.truncate = false;
  text = text_of(config);
  EXPECT_EQ(field(text, "yarn_mscale"), "0.5");
  EXPECT_EQ(field(text, "yarn_correction_range_round_to_int"), "false");
}

TEST(RunConfig, KeepsTheArgumentsOfTrainingThatACheckpointHas) {
  const auto config = config_of({.family = "qwen3_moe"});
  EXPECT_EQ(field(text_of(config), "moe_aux_loss_coeff"), "0.001");  // Megatron-Bridge's
  constexpr std::string_view kGlobals[] = {"argparse.Namespace"};
  distckpt::PickleWriter pickle;
  pickle.begin_object(kArgumentsNamespace);
  pickle.string("moe_aux_loss_coeff").real(0.5);
  pickle.string("moe_router_dtype").none();
  pickle.end_object();
  const auto args =
      distckpt::Pickle::parse(pickle.finish(), {.source = "args", .allowed_globals = kGlobals});
  const auto text = run_config_text(args.root(), config, "");
  EXPECT_EQ(field(text, "moe_aux_loss_coeff"), "0.5");
  EXPECT_EQ(field(text, "moe_router_dtype"), "none");
}

std::string text_of_vision(const std::string& hf_config) {
  auto config = config_of({});
  config.family = "qwen2_5_vl";
  return text_of(config, {}, "", hf_config);
}

TEST(RunConfig, TurnsPositionsByImagesWhereverTheConfigSaysSo) {
  const std::string words = R"("rope_scaling": {"mrope_section": [2, 3, 3]}, "bos_token_id": 7)";
  const std::string flat = R"({"vision_config": {"depth": 2}, )" + words + "}";
  const std::string nested = R"({"vision_config": {"depth": 2}, "text_config": {)" + words + "}}";
  for (const auto& hf_config : {flat, nested}) {
    const auto text = text_of_vision(hf_config);
    EXPECT_EQ(field(text, "position_embedding_type"), "\"mrope\"");
    EXPECT_EQ(field(text, "mrope_section"), "[2, 3, 3]");
    EXPECT_EQ(field(text, "bos_token_id"), "7");
  }
  EXPECT_EQ(field(text_of_vision("{}"), "position_embedding_type"), "\"mrope\"");
}

TEST(RunConfig, TakesNothingFromAConfigThatWouldBeCalled) {
  const auto refuses = [](const std::string& vision_config, const std::string& message) {
    return fails(ErrorKind::kCorrupt, {message},
                 [&] { text_of_vision(R"({"vision_config": )" + vision_config + "}"); });
  };
  EXPECT_TRUE(refuses(R"({"x": [{"_target_": "torch.os.system"}]})", "has the key \"_target_\""));
  EXPECT_TRUE(refuses(R"({"x": "${oc.env:HOME}"})", "has the text"));
}

// A text that is no JSON throws.
TEST(RunConfig, IsOfEveryFamilyThatMegatronBridgeHas) {
  const auto config = config_of({.num_layers = 2});
  std::size_t described = 0;
  for (const auto family : known_families()) {
    auto other = config;
    other.family = family;
    if (known_family(family)->bridge == nullptr) {
      EXPECT_TRUE(run_config_problem(other)) << family;
      continue;
    }
    EXPECT_NE(field(text_of(other), "num_layers"), "none") << family;
    ++described;
  }
  EXPECT_GE(described, 20U);
}

TEST(RunConfig, NamesTheModelThatItCameFrom) {
  EXPECT_EQ(field(text_of(config_of({}), {}, "org/name"), "hf_model_id"), "\"org/name\"");
  EXPECT_EQ(field(text_of(config_of({})), "hf_model_id"), "none");
}

// The reason why Megatron-Bridge cannot make a model.
std::string problem(const TransformerConfig& config) {
  return run_config_problem(config).value_or("none");
}

TEST(RunConfigProblem, OfPlainModelsIsNone) {
  EXPECT_EQ(problem(config_of({})), "none");
  EXPECT_EQ(problem(config_of({.family = "deepseek_v3", .q_lora = 8})), "none");
}

TEST(RunConfigProblem, IsAFamilyThatMegatronBridgeMakesOtherwise) {
  EXPECT_EQ(problem(config_of({.family = "mixtral"})),
            "mixtral: Megatron-Bridge 0.6.2 has no model of this family");
  auto config = config_of({});
  config.family = "mistral3";
  EXPECT_EQ(problem(config), "mistral3: Ferry writes none for this family yet");
}

TEST(RunConfigProblem, OfAModelThatAlsoSeesIsItsLayout) {
  auto config = config_of({});
  config.family = "qwen2_5_vl";
  EXPECT_EQ(problem(config),
            "qwen2_5_vl: Megatron-Bridge opens it in its own layout, --megatron-layout "
            "megatron-bridge");
  EXPECT_EQ(run_config_problem(config, MegatronLayout::kMegatronBridge), std::nullopt);
  config.family = "mistral3";
  EXPECT_NE(run_config_problem(config, MegatronLayout::kMegatronBridge), std::nullopt);
}

TEST(RunConfigProblem, IsAHeadThatIsNoLanguageModels) {
  EXPECT_EQ(problem(config_of({.head = "Token"})), "llama: Megatron-Bridge has no such head");
}

TEST(RunConfigProblem, IsLatentAttentionWithoutARankOfItsQueries) {
  EXPECT_NE(problem(config_of({.family = "deepseek_v2"})).find("has no q_lora_rank"),
            std::string::npos);
}

TEST(RunConfigProblem, IsAScalingOfPositionsWithoutAnArgument) {
  auto config = config_of({});
  config.rope_scaling.type = models::RopeType::kLongrope;
  EXPECT_EQ(problem(config),
            "llama: scales positions by longrope, for which Megatron-LM has no argument");
  config.rope_scaling.type = models::RopeType::kLlama3;
  EXPECT_EQ(problem(config), "none");
  config.rope_scaling.original_max_position_embeddings = 4096;
  EXPECT_EQ(problem(config),
            "llama: scales positions by llama3 with frequencies of its own, for which "
            "Megatron-Bridge has no field");
}

TEST(RunConfigProblem, IsAnyScalingOfLatentAttentionButYarn) {
  auto config = config_of({.family = "deepseek_v3", .q_lora = 8});
  config.rope_scaling = {.type = models::RopeType::kYarn, .factor = 4.0, .attention_factor = 1.5};
  EXPECT_EQ(problem(config), "none");  // arguments say the factor by mscale
  config.rope_scaling.truncate = false;
  EXPECT_NE(problem(config).find("a range that is not rounded"), std::string::npos);
  config.rope_scaling = {.type = models::RopeType::kLinear, .factor = 4.0};
  EXPECT_NE(problem(config).find("another way than yarn"), std::string::npos);
}

TEST(RunConfigProblem, IsAGroupOfExpertsThatMegatronCoreWeighsByOthers) {
  auto config = config_of({.family = "deepseek_v3", .q_lora = 8});
  config.moe_router_num_groups = 4;
  config.moe_router_group_topk = 2;
  config.moe_router_topk = 4;
  EXPECT_EQ(problem(config), "none");
  config.moe_router_topk = 6;
  EXPECT_NE(problem(config).find("chooses 6 experts of 2 groups"), std::string::npos);
}

TEST(RunConfigProblem, IsALayerOfQwen3MoeWithoutExperts) {
  auto config = config_of({.family = "qwen3_moe"});
  EXPECT_EQ(problem(config), "none");
  config.moe_layer_freq[0] = false;
  EXPECT_NE(problem(config).find("has layers without experts"), std::string::npos);
}

TEST(RunConfigProblem, IsAFactorOfScaledPositionsThatDoesNotFollowFromTheScaling) {
  auto config = config_of({});
  config.rope_scaling = {.type = models::RopeType::kYarn, .factor = 4.0};
  EXPECT_EQ(problem(config), "none");
  config.rope_scaling.attention_factor = 1.5;
  EXPECT_NE(problem(config).find("with an attention_factor"), std::string::npos);
}

TEST(RunConfigProblem, IsLocalAttentionThatAModelOfGemmaCountsOtherwise) {
  auto config = config_of_gemma3();
  EXPECT_EQ(problem(config), "none");
  config.window_attn_skip_freq = {false, true, true};
  EXPECT_NE(problem(config).find("do not alternate by a number"), std::string::npos);
  config.window_attn_skip_freq = {true, false, true};
  config.family = "gemma2";
  EXPECT_EQ(problem(config), "none");
  config.window_attn_skip_freq = {true, true, false};
  EXPECT_NE(problem(config).find("not that of every other layer"), std::string::npos);
}

TEST(RunConfigProblem, IsGemmaWithoutTheScaleOfItsAttention) {
  auto config = config_of_gemma3();
  config.softmax_scale.reset();
  EXPECT_NE(problem(config).find("name its config.json"), std::string::npos);
}

TEST(RunConfigProblem, IsAPartOfAModel) {
  const support::TempDir dir;
  support::write_tiny_model({}, dir.path(), 1);
  auto source = open(dir.path());
  EXPECT_FALSE(run_config_problem(source, MegatronLayout::kLanguageModel));
  source.hf->part = {{.include = {"model.norm.weight"}}};
  EXPECT_EQ(run_config_problem(source, MegatronLayout::kLanguageModel),
            "llama: Megatron-Bridge opens whole language models");
}

class WriteRunConfig : public testing::Test {
 protected:
  WriteRunConfig() {
    support::write_tiny_model({}, dir_ / "hf", 1);
    convert({.from = dir_ / "hf", .to = dir_ / "megatron"});
  }
  support::TempDir dir_;
};

TEST_F(WriteRunConfig, ReplacesTheOneBesideACheckpoint) {
  const auto checkpoint = open(dir_ / "megatron");
  const auto path = checkpoint.location.folder / kRunConfig;
  const auto converted = distckpt::read_text(path);
  distckpt::write_text(path, "model: null\n");
  EXPECT_EQ(write_run_config(checkpoint, ""), path);
  EXPECT_EQ(distckpt::read_text(path), converted);
  write_run_config(checkpoint, "org/name");
  EXPECT_EQ(field(distckpt::read_text(path), "hf_model_id"), "\"org/name\"");
}

TEST_F(WriteRunConfig, RefusesACheckpointOfAnotherFormat) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"hf: is no torch_dist checkpoint with arguments"},
                    [&] { write_run_config(open(dir_ / "hf"), ""); }));
  EXPECT_FALSE(fs::exists(dir_ / "hf" / kRunConfig));
}

}  // namespace run_config_test
}  // namespace ferry::converter
