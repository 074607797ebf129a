// Mixtral: experts in every layer, and a sliding window.
#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kMixtralMoe[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "block_sparse_moe.gate.weight"},
    kMixtralGateUpExperts,
    kMixtralDownExperts,
};

constexpr HfNames kMixtralNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .moe_mlp = kMixtralMoe,
    .last = kHeadNames,
    .modules = kMixtralModules,
};

constexpr Family kMixtral[] = {
    {.model_type = "mixtral",
     .names = &kMixtralNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "num_key_value_heads": 8,
                     "num_local_experts": 8})",
     .rotary_base = 1e6,
     .num_experts_key = "num_local_experts",
     .traits = {.moe_router_weights_in_fp32 = true},
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_linear_biases(fields, config);
           config.sliding_window = fields.optional_size("sliding_window");
           config.num_moe_experts = fields.size("num_local_experts", std::nullopt, kMaxExperts);
           config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
           config.moe_ffn_hidden_size = config.ffn_hidden_size;
           config.moe_router_topk = fields.size("num_experts_per_tok", 2);
         },
     .describes =
         [](const TransformerConfig& config) {
           return !config.multi_latent_attention && config.num_moe_experts > 0 &&
                  !config.moe_router_enable_expert_bias && !config.qk_layernorm &&
                  !config.add_qkv_bias;
         }},
};

}  // namespace

const std::span<const Family> kMixtralFamilies = kMixtral;

}  // namespace ferry::converter
