// GLM-4 of April 2025: norms behind attention and feed-forward, gate and up in one tensor, half of
// a head's channels turn with their neighbours.
#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kGlm4AttentionNames[] = {
    {"self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight"},
    {"self_attention.linear_qkv.bias", "self_attn.{q,k,v}_proj.bias"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
    {"post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"},
};

constexpr HfName kGlm4MlpNames[] = {
    {"mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"},
    {"post_mlp_layernorm.weight", "post_mlp_layernorm.weight"},
};

constexpr HfNames kGlm4Names{
    .first = kEmbeddingNames,
    .attention = kGlm4AttentionNames,
    .dense_mlp = kGlm4MlpNames,
    .last = kHeadNames,
};

constexpr Family kGlm4[] = {
    {.model_type = "glm4",
     .names = &kGlm4Names,
     .defaults = R"({"rms_norm_eps": 1.5625e-07, "num_key_value_heads": 2})",
     .rotary_percent = 0.5,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           config.add_qkv_bias = fields.flag("attention_bias", true);
           config.rotary_interleaved = true;
           config.post_norm = models::PostNorm::kOfLayer;
         },
     .describes =
         [](const TransformerConfig& config) {
           return config.post_norm == models::PostNorm::kOfLayer && config.rotary_interleaved;
         },
     .rare = true},
};

}  // namespace

const std::span<const Family> kGlm4Families = kGlm4;

}  // namespace ferry::converter
