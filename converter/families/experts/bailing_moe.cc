// Ling 2 (BailingMoeV2): DeepSeek's experts, attention by query groups with query, key and value in
// one tensor, names of its own. It is published with the model_type of Ling 1.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kBailingEmbeddingNames[] = {
    {"embedding.word_embeddings.weight", "model.word_embeddings.weight"},
};

constexpr HfName kBailingAttentionNames[] = {
    {"self_attention.linear_qkv.weight", "attention.query_key_value.weight"},
    {"self_attention.linear_qkv.bias", "attention.query_key_value.bias"},
    {"self_attention.linear_proj.weight", "attention.dense.weight"},
    {"self_attention.q_layernorm.weight", "attention.query_layernorm.weight"},
    {"self_attention.k_layernorm.weight", "attention.key_layernorm.weight"},
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};

constexpr HfName kBailingMoeNames[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight"},
    {"mlp.router.expert_bias", "mlp.gate.expert_bias"},
    {"mlp.experts.experts.linear_fc1.weight", "mlp.experts.{e}.{gate,up}_proj.weight"},
    {"mlp.experts.experts.linear_fc2.weight", "mlp.experts.{e}.down_proj.weight"},
    {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.{gate,up}_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"},
};

constexpr HfName kBailingPredictionNames[] = {
    {"enorm.weight", "enorm.weight"},
    {"hnorm.weight", "hnorm.weight"},
    {"eh_proj.weight", "eh_proj.weight"},
    {"final_layernorm.weight", "final_layernorm.weight"},
};

constexpr HfNames kBailingNames{
    .first = kBailingEmbeddingNames,
    .attention = kBailingAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kBailingMoeNames,
    .last = kHeadNames,
    .prediction = kBailingPredictionNames,
};

void read_bailing(const ConfigFields& fields, TransformerConfig& config) {
  require(!fields.flag("use_bias", false), ErrorKind::kLayout,
          "{}: use_bias is true, which is not handled", fields.source());
  const auto score = fields.text("score_function", "sigmoid");
  require(score == "sigmoid", ErrorKind::kLayout,
          "{}: score_function is \"{}\", only \"sigmoid\" is handled", fields.source(), score);
  require_normed_weights(fields);
  config.add_qkv_bias = fields.flag("use_qkv_bias", false);
  config.qk_layernorm = fields.flag("use_qk_norm", true);
  config.num_moe_experts = fields.size("num_experts", std::nullopt, kMaxExperts);
  read_dense_layers(fields, config);
  config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
  config.moe_shared_expert_intermediate_size =
      fields.count("num_shared_experts", 1, kMaxExperts) * config.moe_ffn_hidden_size;
  config.moe_router_topk = fields.size("num_experts_per_tok", 8);
  config.moe_router_score_function = models::ScoreFunction::kSigmoid;
  config.moe_router_enable_expert_bias = fields.flag("moe_router_enable_expert_bias", true);
  read_expert_groups(fields, config);
}

constexpr BridgeModel kBailingProvider{
    .settings = R"({"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32"})",
    .layer_spec = kDecoderBlockSpec,
};

constexpr Family kBailing[] = {
    {.model_type = "bailing_moe_v2",
     .shared_model_type = "bailing_moe",
     .architecture = "BailingMoeV2ForCausalLM",
     .names = &kBailingNames,
     .turns_in_part = true,
     .traits = {.not_computed = "a rounding of experts' results of their own"},
     .prediction = kNextnPrediction,
     .configure = read_bailing,
     .bridge = &kBailingProvider},
};

}  // namespace

const std::span<const Family> kBailingFamilies = kBailing;

}  // namespace ferry::converter
