// DeepSeek-V2, DeepSeek-V3 and Moonlight: multi-head latent attention, fine-grained and shared
// experts; V3 has routers with a bias, and prediction layers.
#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kLatentAttentionNames[] = {
    {"input_layernorm.weight", "input_layernorm.weight"},
    {"self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"},
    {"self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"},
    {"self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"},
    {"self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"},
    {"self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"},
    {"self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
};

constexpr HfNames kDeepSeekNames{
    .first = kEmbeddingNames,
    .attention = kLatentAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kDeepSeekMoeNames,
    .last = kHeadNames,
    .prediction = kDeepSeekPredictionNames,
    .prediction_copies = kDeepSeekPredictionCopies,
};

void read_deepseek(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  config.multi_latent_attention = true;
  config.q_lora_rank = fields.optional_size("q_lora_rank").value_or(0);
  config.kv_lora_rank = fields.size("kv_lora_rank");
  config.qk_head_dim = fields.size("qk_nope_head_dim");
  config.qk_pos_emb_head_dim = fields.size("qk_rope_head_dim");
  config.v_head_dim = fields.size("v_head_dim");
  read_deepseek_experts(fields, config);
}

constexpr Family kDeepSeek[] = {
    {.model_type = "deepseek_v2",
     .names = &kDeepSeekNames,
     .configure = read_deepseek,
     .describes =
         [](const TransformerConfig& config) {
           return config.multi_latent_attention && !config.moe_router_enable_expert_bias;
         }},
    {.model_type = "deepseek_v3",
     .names = &kDeepSeekNames,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_deepseek(fields, config);
           read_prediction_layers(fields, config);
           config.moe_router_score_function = fields.text("scoring_func", "sigmoid");
           config.moe_router_enable_expert_bias =
               fields.text("topk_method", "noaux_tc") == "noaux_tc";
         },
     .describes =
         [](const TransformerConfig& config) {
           return config.multi_latent_attention && config.moe_router_enable_expert_bias;
         }},
};

}  // namespace

const std::span<const Family> kDeepSeekFamilies = kDeepSeek;

}  // namespace ferry::converter
