// Llama, Mistral, Ministral 3, Qwen2, Qwen3 and Seed-OSS, and the language models of Ministral 3,
// Qwen2.5-VL and Qwen3-VL: dense layers with attention by query groups. They differ in biases,
// norms of queries and keys, a sliding window, and the prefixes of names.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

// Ministral 3 with its vision tower.
constexpr HfNames kWrappedNames{
    .layer = kWrappedLayer,
    .first = kWrappedEmbedding,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .last = kWrappedHead,
    .carried = kVisionTower,
    .modules = kWrappedModules,
    .bridge_tower = kBridgeVisionTower,
};

constexpr std::string_view kQwen25Visual[] = {"visual."};
constexpr TowerRule kQwen25Bridge[] = {{"visual.**", "visual.**"}};
// Qwen2_5VisionModel of mbridge: a TransformerBlock and a MultimodalProjector.
constexpr TowerRule kQwen25Mbridge[] = {
    {"visual.patch_embed.proj.weight", "vision_model.patch_embed.proj.weight"},
    {"visual.blocks.{l}.norm1.weight",
     "vision_model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"},
    {"visual.blocks.{l}.attn.qkv.weight",
     "vision_model.decoder.layers.self_attention.linear_qkv.weight", true},
    {"visual.blocks.{l}.attn.qkv.bias",
     "vision_model.decoder.layers.self_attention.linear_qkv.bias", true},
    {"visual.blocks.{l}.attn.proj.weight",
     "vision_model.decoder.layers.self_attention.linear_proj.weight"},
    {"visual.blocks.{l}.attn.proj.bias",
     "vision_model.decoder.layers.self_attention.linear_proj.bias"},
    {"visual.blocks.{l}.norm2.weight",
     "vision_model.decoder.layers.mlp.linear_fc1.layer_norm_weight"},
    {"visual.blocks.{l}.mlp.{gate,up}_proj.weight",
     "vision_model.decoder.layers.mlp.linear_fc1.weight"},
    {"visual.blocks.{l}.mlp.{gate,up}_proj.bias",
     "vision_model.decoder.layers.mlp.linear_fc1.bias"},
    {"visual.blocks.{l}.mlp.down_proj.weight", "vision_model.decoder.layers.mlp.linear_fc2.weight"},
    {"visual.blocks.{l}.mlp.down_proj.bias", "vision_model.decoder.layers.mlp.linear_fc2.bias"},
    {"visual.merger.ln_q.weight", "vision_model.decoder.final_layernorm.weight"},
    {"visual.merger.mlp.0.weight", "vision_model.projection.encoder.linear_fc1.weight"},
    {"visual.merger.mlp.0.bias", "vision_model.projection.encoder.linear_fc1.bias"},
    {"visual.merger.mlp.2.weight", "vision_model.projection.encoder.linear_fc2.weight"},
    {"visual.merger.mlp.2.bias", "vision_model.projection.encoder.linear_fc2.bias"},
};
constexpr ModuleName kQwen25Modules[] = {
    {"visual.", "model.visual."},
    {"model.", "model.language_model."},
};
constexpr HfNames kQwen25SeeingNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .last = kHeadNames,
    .carried = kQwen25Visual,
    .modules = kQwen25Modules,
    .bridge_tower = kQwen25Bridge,
    .mbridge_tower = kQwen25Mbridge,
};

constexpr HfNames kQwen3SeeingNames{
    .layer = kSeeingLayer,
    .first = kSeeingEmbedding,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .last = kSeeingHead,
    .carried = kVisual,
    .bridge_tower = kQwen3BridgeTower,
    .mbridge_tower = kQwen3BridgeTower,
    .computed_tower = kQwen3Tower,
};

void read_mistral(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  config.sliding_window = fields.optional_size("sliding_window");
}

// Ministral-8B names its layers of full attention, and transformers then takes a class of its own.
void read_mistral_layers(const ConfigFields& fields, TransformerConfig& config) {
  read_mistral(fields, config);
  set_window_layers(
      fields, [](std::int64_t) { return true; }, config);
}

void read_qwen2(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  config.add_qkv_bias = true;
  read_qwen_window(fields, config);
}

// Files that transformers 4.52 to 4.57 saved say inside of text_config alone that the ends are
// tied.
void read_qwen2_5_vl(const ConfigFields& fields, TransformerConfig& config) {
  read_qwen2(fields, config);
  if (fields.flag("tie_word_embeddings", false)) config.untie_embeddings_and_output_weights = false;
}

// Without a window, whatever config.json says of one: Qwen3-VL's class has none.
void read_qwen3_vl(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  config.qk_layernorm = true;
}

void read_qwen3(const ConfigFields& fields, TransformerConfig& config) {
  read_qwen3_vl(fields, config);
  read_qwen_window(fields, config);
}

bool is_dense(const TransformerConfig& config) {
  return !config.multi_latent_attention && config.num_moe_experts == 0;
}

constexpr BridgeModel kQwen25SeeingProvider{
    .provider = "qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider",
    .vision_config = "qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig",
    .mrope = true};
constexpr BridgeModel kQwen3SeeingProvider{
    .provider = "qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider",
    .vision_config = "qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig",
    .mrope = true};

constexpr std::string_view kMinistrals[] = {"ministral", "ministral3"};

constexpr Family kFamilies[] = {
    {.model_type = "llama",
     .names = &kLlamaNames,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_linear_biases,
     .describes =
         [](const TransformerConfig& config) {
           return is_dense(config) && !config.qk_layernorm && !config.add_qkv_bias &&
                  !config.sliding_window;
         },
     .bridge = &kPlainBridgeModel},
    {.model_type = "mistral",
     .names = &kLlamaNames,
     .defaults = R"({"sliding_window": 4096})",
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_mistral_layers,
     .describes =
         [](const TransformerConfig& config) {
           return is_dense(config) && !config.qk_layernorm && !config.add_qkv_bias &&
                  config.sliding_window.has_value();
         },
     .bridge = &kPlainBridgeModel},
    {.model_type = "ministral",  // what transformers 5 makes of a mistral with layer_types
     .names = &kLlamaNames,
     .defaults = R"({"sliding_window": 4096})",
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_mistral_layers},
    {.model_type = "qwen2",
     .names = &kLlamaNames,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_qwen2,
     .describes =
         [](const TransformerConfig& config) {
           return is_dense(config) && !config.qk_layernorm && config.add_qkv_bias;
         },
     .bridge = &kPlainBridgeModel},
    {.model_type = "qwen3",
     .names = &kLlamaNames,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_qwen3,
     .describes =
         [](const TransformerConfig& config) { return is_dense(config) && config.qk_layernorm; },
     .bridge = &kPlainBridgeModel},
    {.model_type = "ministral3",
     .names = &kLlamaNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "head_dim": 128})",
     .default_rope = R"({"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                         "original_max_position_embeddings": 16384, "beta_fast": 32.0,
                         "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                         "llama_4_scaling_beta": 0.1})",
     .scales_queries = true,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_mistral},
    {.model_type = "mistral3",
     .names = &kWrappedNames,
     .config_key = "text_config",
     .defaults = R"({"sliding_window": 4096})",
     .text_families = kMinistrals,
     .tied = true,
     .configure = read_mistral,
     .no_bridge = kBridgeNotDescribed},
    {.model_type = "qwen2_5_vl",
     .names = &kQwen25SeeingNames,
     .config_key = "text_config",
     .defaults = R"({"max_window_layers": 80, "rms_norm_eps": 1e-05})",
     .rotary_base = 1e6,
     .configure = read_qwen2_5_vl,
     .bridge_seeing = &kQwen25SeeingProvider},
    {.model_type = "qwen3_vl",
     .names = &kQwen3SeeingNames,
     .config_key = "text_config",
     .defaults = R"({"head_dim": 128})",
     .rotary_base = 5e5,
     .configure = read_qwen3_vl,
     .configure_vision = read_qwen3_vision,
     .bridge_seeing = &kQwen3SeeingProvider},
    {.model_type = "seed_oss",
     .names = &kLlamaNames,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           for (const auto* key : {"attention_out_bias", "mlp_bias"}) {
             require(!fields.flag(key, false), ErrorKind::kLayout,
                     "{}: {} is true, which is not handled", fields.source(), key);
           }
           config.add_qkv_bias = fields.flag("attention_bias", true);
         }},
};

}  // namespace

const std::span<const Family> kLlamaFamilies = kFamilies;

}  // namespace ferry::converter
