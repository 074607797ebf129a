// Qwen2-MoE and Qwen3-MoE: experts in some layers; Qwen2-MoE shares some, behind a gate. Qwen3-VL
// with experts: one tensor for those of a layer, transposed on the hub and not where transformers 5
// saves it.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kQwenMoe[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight"},
    kGateUpExperts,
    kDownExperts,
    {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_expert.{gate,up}_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"},
    {"mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"},
};

constexpr HfNames kQwenMoeNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kQwenMoe,
    .last = kHeadNames,
};

constexpr HfName kSeeingMoe[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight"},
    {.parameter = "mlp.experts.experts.linear_fc1.weight",
     .hf = "mlp.experts.gate_up_proj",
     .transposed = true,
     .either_way = true},
    {.parameter = "mlp.experts.experts.linear_fc2.weight",
     .hf = "mlp.experts.down_proj",
     .transposed = true,
     .either_way = true},
};

constexpr HfNames kSeeingMoeNames{
    .layer = kSeeingLayer,
    .first = kSeeingEmbedding,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kSeeingMoe,
    .last = kSeeingHead,
    .carried = kVisual,
    .fp8_experts = true,
    .bridge_tower = kQwen3BridgeTower,
    .mbridge_tower = kQwen3BridgeTower,
    .computed_tower = kQwen3Tower,
};

bool has_qwen_experts(const TransformerConfig& config) {
  return !config.multi_latent_attention && config.num_moe_experts > 0 &&
         !config.moe_router_enable_expert_bias;
}

std::string_view layers_without_experts(const TransformerConfig& config) {
  const auto experts = std::ranges::count(config.moe_layer_freq, true);
  return experts == config.num_layers ? "" : "has layers without experts, which its model lacks";
}

constexpr BridgeModel kQwen3Provider{
    .settings = R"({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001})",
    .problem = layers_without_experts,
};

constexpr BridgeModel kQwen3SeeingMoeProvider{
    .provider = "qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider",
    .settings = kQwen3Provider.settings,
    .configure =
        [](const TransformerConfig& config, nlohmann::ordered_json& provider) {
          provider["head_dim"] = config.kv_channels;
        },
    .problem = layers_without_experts,
    .vision_config = "qwen3_vl_moe.configuration_qwen3_vl_moe.Qwen3VLMoeVisionConfig",
    .mrope = true};

constexpr Family kQwenMoeList[] = {
    {.model_type = "qwen2_moe",
     .names = &kQwenMoeNames,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_qwen_experts(fields, config);
           read_used_window(fields, config);
           // configuration_qwen2_moe.py
           const auto end = fields.count("max_window_layers", kMaxWindowLayers, kMaxSize);
           set_window_layers(
               fields, [end](std::int64_t layer) { return layer % 2 == 0 && layer < end; }, config);
           config.add_qkv_bias = fields.flag("qkv_bias", true);
           config.moe_router_topk = fields.size("num_experts_per_tok", 4);
           config.moe_shared_expert_intermediate_size =
               fields.size("shared_expert_intermediate_size");
           config.moe_shared_expert_gate = true;
         },
     .describes =
         [](const TransformerConfig& config) {
           return has_qwen_experts(config) && !config.qk_layernorm && config.add_qkv_bias;
         }},
    {.model_type = "qwen3_moe",
     .names = &kQwenMoeNames,
     .defaults = R"({"num_key_value_heads": 4})",
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_qwen_experts(fields, config);
           read_used_window(fields, config);
           config.qk_layernorm = true;
           config.moe_router_topk = fields.size("num_experts_per_tok", 8);
         },
     .describes =
         [](const TransformerConfig& config) {
           return has_qwen_experts(config) && config.qk_layernorm;
         },
     .bridge = &kQwen3Provider},
    {.model_type = "qwen3_vl_moe",
     .names = &kSeeingMoeNames,
     .config_key = "text_config",
     .rotary_base = 5e5,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_qwen_experts(fields, config);
           config.qk_layernorm = true;
           config.moe_router_topk = fields.size("num_experts_per_tok", 4);
           // Its class divides the weights of experts by their sum, whatever config.json says.
           config.moe_router_pre_softmax = false;
         },
     .configure_vision = read_qwen3_vision,
     .bridge_seeing = &kQwen3SeeingMoeProvider},
};

}  // namespace

const std::span<const Family> kQwenMoeFamilies = kQwenMoeList;

}  // namespace ferry::converter
