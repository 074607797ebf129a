// Gemma 3, text alone or with a vision tower: norms behind attention and feed-forward that multiply
// by 1 + weight, layers of local attention between those of global, GELU.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kGemmaAttentionNames[] = {
    {"self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight"},
    {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight"},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
    {"self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"},
};

constexpr HfName kGemmaMlpNames[] = {
    {"mlp.linear_fc1.weight", "mlp.{gate,up}_proj.weight"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight"},
    {"mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"},
};

constexpr HfNames kGemmaNames{
    .first = kEmbeddingNames,
    .attention = kGemmaAttentionNames,
    .dense_mlp = kGemmaMlpNames,
    .last = kHeadNames,
};

// Megatron-Bridge's projector is a linear layer, which holds the transpose.
constexpr TowerRule kGemmaBridge[] = {
    {"vision_tower.**", "vision_tower.**"},
    {"multi_modal_projector.mm_soft_emb_norm.weight",
     "multi_modal_projector.mm_soft_embed_norm.weight"},
    {"multi_modal_projector.mm_input_projection_weight", "multi_modal_projector.proj.weight", false,
     true},
};

constexpr HfNames kSeeingGemmaNames{
    .layer = kWrappedLayer,
    .first = kWrappedEmbedding,
    .attention = kGemmaAttentionNames,
    .dense_mlp = kGemmaMlpNames,
    .last = kWrappedHead,
    .carried = kVisionTower,
    .bridge_tower = kGemmaBridge,
};

void read_gemma(const ConfigFields& fields, TransformerConfig& config) {
  require(!fields.flag("attention_bias", false), ErrorKind::kLayout,
          "{}: attention_bias is true, which is not handled", fields.source());
  config.qk_layernorm = true;
  config.layernorm_zero_centered_gamma = true;
  config.post_norm = models::PostNorm::kOfLinear;
}

constexpr Family kGemma[] = {
    {.model_type = "gemma3_text",
     .names = &kGemmaNames,
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = "gelu_pytorch_tanh",
     .configure = read_gemma,
     .describes =
         [](const TransformerConfig& config) {
           return config.layernorm_zero_centered_gamma && config.qk_layernorm &&
                  config.num_moe_experts == 0;
         },
     .rare = true},
    {.model_type = "gemma3",
     .names = &kSeeingGemmaNames,
     .config_key = "text_config",
     // Gemma3TextConfig of transformers: the files of the hub leave these out.
     .defaults = R"({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                     "vocab_size": 262208, "max_position_embeddings": 131072})",
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = "gelu_pytorch_tanh",
     .configure = read_gemma},
};

}  // namespace

const std::span<const Family> kGemmaFamilies = kGemma;

}  // namespace ferry::converter
