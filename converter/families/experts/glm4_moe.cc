// GLM-4.5: attention by query groups whose heads turn in part, DeepSeek's experts and prediction
// layer.
#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfNames kGlmNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kDeepSeekMoeNames,
    .last = kHeadNames,
    .prediction = kDeepSeekPredictionNames,
    .prediction_copies = kDeepSeekPredictionCopies,
};

constexpr BridgeModel kGlmProvider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001,
                    "moe_router_dtype": "fp32", "moe_router_bias_update_rate": 0,
                    "mtp_loss_scaling_factor": 0.3})",
    .layer_spec = kDecoderBlockSpec,
};

constexpr Family kGlm[] = {
    {.model_type = "glm4_moe",
     .names = &kGlmNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "num_key_value_heads": 8,
                     "first_k_dense_replace": 1, "n_shared_experts": 1})",
     .rotary_percent = 0.5,
     .num_experts_key = "n_routed_experts",
     .prediction = kNextnPrediction,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           require_normed_weights(fields);
           config.add_qkv_bias = fields.flag("attention_bias", false);
           config.qk_layernorm = fields.flag("use_qk_norm", false);
           read_deepseek_experts(fields, config);
           config.moe_router_pre_softmax = false;
           config.moe_router_score_function = models::ScoreFunction::kSigmoid;
           config.moe_router_enable_expert_bias = true;
         },
     .describes =
         [](const TransformerConfig& config) {
           return !config.multi_latent_attention && config.moe_router_enable_expert_bias;
         },
     .bridge = &kGlmProvider},
};

}  // namespace

const std::span<const Family> kGlmFamilies = kGlm;

}  // namespace ferry::converter
