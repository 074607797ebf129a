// OLMo 2 and 3: norms behind attention and feed-forward alone, and of queries and keys over all
// heads. OLMo 3 has layers with a sliding window, which turn without scaling.
#include "converter/families/family.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kOlmoAttentionNames[] = {
    {"self_attention.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight", models::when::kQkNormFull},
    {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight", models::when::kQkNormFull},
    {"post_self_attn_layernorm.weight", "post_attention_layernorm.weight"},
};

constexpr HfName kOlmoMlpNames[] = {
    {"mlp.linear_fc1.weight", "mlp.{gate,up}_proj.weight"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"},
};

constexpr HfNames kOlmoNames{
    .first = kEmbeddingNames,
    .attention = kOlmoAttentionNames,
    .dense_mlp = kOlmoMlpNames,
    .last = kHeadNames,
};

void read_olmo2(const ConfigFields& fields, TransformerConfig& config) {
  read_linear_biases(fields, config);
  config.qk_layernorm = config.qk_layernorm_full = true;
  config.pre_norm = false;
  config.post_norm = models::PostNorm::kOfLayer;
}

constexpr double kOlmo3Base = 5e5;

void read_olmo3(const ConfigFields& fields, TransformerConfig& config) {
  read_olmo2(fields, config);
  config.sliding_window = fields.optional_size("sliding_window");
  set_window_layers(
      fields, [](std::int64_t layer) { return (layer + 1) % 4 != 0; }, config);
  const auto local = read_local_base(fields, kOlmo3Base);
  if (local != config.rotary_base) config.rotary_base_local = local;
}

bool is_olmo(const TransformerConfig& config) {
  return config.qk_layernorm_full && !config.pre_norm && config.num_moe_experts == 0;
}

constexpr Family kOlmo[] = {
    {.model_type = "olmo2",
     .names = &kOlmoNames,
     .defaults = R"({"rms_norm_eps": 1e-05})",
     .traits = {.rotary_in_fp32 = true, .norms_round_once = true},
     .head_classes = HeadClasses::kOfSequences,
     .configure = read_olmo2,
     .describes =
         [](const TransformerConfig& config) { return is_olmo(config) && !config.sliding_window; },
     .rare = true},
    {.model_type = "olmo3",
     .names = &kOlmoNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "sliding_window": 4096})",
     .rotary_base = kOlmo3Base,
     .rope_of_layers = true,
     .traits = {.rotary_in_fp32 = true, .windows_turn_unscaled = true, .norms_round_once = true},
     .head_classes = HeadClasses::kOfSequences,
     .configure = read_olmo3,
     .describes =
         [](const TransformerConfig& config) { return is_olmo(config) && config.sliding_window; },
     .rare = true},
};

}  // namespace

const std::span<const Family> kOlmoFamilies = kOlmo;

}  // namespace ferry::converter
