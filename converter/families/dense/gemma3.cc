// Gemma 2, and Gemma 3, text alone or with a vision tower: norms behind attention and feed-forward
// that multiply by 1 + weight, layers of local attention between those of global, which turn by
// other angles, GELU.
#include <cmath>
#include <utility>

#include "converter/families/family.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr std::string_view kLocalAttention = "sliding_attention";
constexpr std::string_view kGlobalAttention = "full_attention";

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

// All layers but every `every`-th, where layer_types names none.
std::vector<bool> local_layers(const ConfigFields& fields,
                               std::int64_t num_layers,
                               std::int64_t every) {
  if (auto named =
          layers_of_kind(fields, "layer_types", kLocalAttention, kGlobalAttention, num_layers))
    return std::move(*named);
  std::vector<bool> local;
  for (std::int64_t i = 0; i < num_layers; ++i) local.push_back((i + 1) % every != 0);
  return local;
}

// transformers 5 writes rope_parameters of each kind of layer, older ones rope_local_base_freq.
double read_local_base(const ConfigFields& fields) {
  const auto base = fields.optional_number("rope_local_base_freq").value_or(10000.0);
  const auto* const of_layers = fields.find("rope_parameters");
  if (of_layers == nullptr || !of_layers->contains(kLocalAttention)) return base;
  const ConfigFields local(
      (*of_layers)[kLocalAttention],
      fmt::format("{}: rope_parameters of {}", fields.source(), kLocalAttention));
  const auto type = local.text("rope_type", "default");
  require(type == "default", ErrorKind::kLayout, "{}: rope_type is \"{}\", which is not handled",
          local.source(), type);
  return local.optional_number("rope_theta").value_or(base);
}

void read_gemma2(const ConfigFields& fields, TransformerConfig& config) {
  for (const auto* key : {"attention_bias", "use_bidirectional_attention"})
    require(!fields.flag(key, false), ErrorKind::kLayout, "{}: {} is true, which is not handled",
            fields.source(), key);
  config.sliding_window = fields.size("sliding_window", 4096);
  config.window_attn_skip_freq = local_layers(fields, config.num_layers, 2);
  const auto scalar = fields.optional_number("query_pre_attn_scalar").value_or(256.0);
  require(scalar > 0, ErrorKind::kCorrupt, "{}: query_pre_attn_scalar is {}", fields.source(),
          scalar);
  config.softmax_scale = std::pow(scalar, -0.5);
  config.embedding_scaling = true;
  config.attn_logit_softcapping = fields.optional_number("attn_logit_softcapping");
  config.final_logit_softcapping = fields.optional_number("final_logit_softcapping");
  config.layernorm_zero_centered_gamma = true;
  config.post_norm = models::PostNorm::kOfLinear;
}

// Its attention has no soft cap, whatever config.json says of one.
void read_gemma3(const ConfigFields& fields, TransformerConfig& config) {
  read_gemma2(fields, config);
  const auto every = fields.size("sliding_window_pattern", 6);
  config.window_attn_skip_freq = local_layers(fields, config.num_layers, every);
  config.rotary_base_local = read_local_base(fields);
  config.attn_logit_softcapping.reset();
  config.qk_layernorm = true;
}

constexpr Family kGemma[] = {
    {.model_type = "gemma2",
     .names = &kGemmaNames,
     // Gemma2Config of transformers.
     .defaults = R"({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                     "head_dim": 256})",
     .tied = true,
     .activation = "gelu_pytorch_tanh",
     .configure = read_gemma2,
     .describes =
         [](const TransformerConfig& config) {
           return config.layernorm_zero_centered_gamma && !config.qk_layernorm &&
                  !config.has_linear_attention() && config.num_moe_experts == 0;
         },
     .rare = true},
    {.model_type = "gemma3_text",
     .names = &kGemmaNames,
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = "gelu_pytorch_tanh",
     .configure = read_gemma3,
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
     .configure = read_gemma3},
};

}  // namespace

const std::span<const Family> kGemmaFamilies = kGemma;

}  // namespace ferry::converter
