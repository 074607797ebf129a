// OLMoE: experts in every layer, norms of queries and keys over all heads.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kOlmoeMoeNames[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight"},
    kGateUpExperts,
    kDownExperts,
};

constexpr HfNames kOlmoeNames{
    .first = kEmbeddingNames,
    .attention = kFullNormAttentionNames,
    .moe_mlp = kOlmoeMoeNames,
    .last = kHeadNames,
};

constexpr BridgeModel kOlmoeProvider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01,
                    "moe_router_dtype": "fp32"})",
    .layer_spec = R"({"_target_": "megatron.bridge.models.olmoe.olmoe_provider.olmoe_layer_spec",
                      "_call_": false})",
};

constexpr Family kOlmoe[] = {
    {.model_type = "olmoe",
     .names = &kOlmoeNames,
     .defaults = R"({"rms_norm_eps": 1e-05})",
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_linear_biases(fields, config);
           require(fields.find("clip_qkv") == nullptr, ErrorKind::kLayout,
                   "{}: clip_qkv is set, which is not handled", fields.source());
           config.qk_layernorm = config.qk_layernorm_full = true;
           config.num_moe_experts = fields.size("num_experts", 64, kMaxExperts);
           config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
           config.moe_ffn_hidden_size = config.ffn_hidden_size;
           config.moe_router_topk = fields.size("num_experts_per_tok", 8);
           config.moe_router_pre_softmax = !fields.flag("norm_topk_prob", false);
         },
     .describes =
         [](const TransformerConfig& config) {
           return config.qk_layernorm_full && config.num_moe_experts > 0 &&
                  !config.moe_router_enable_expert_bias;
         },
     .rare = true,
     .bridge = &kOlmoeProvider},
};

}  // namespace

const std::span<const Family> kOlmoeFamilies = kOlmoe;

}  // namespace ferry::converter
