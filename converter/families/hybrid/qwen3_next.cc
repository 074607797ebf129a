// Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets (linear attention) in most layers, gated
// attention in the others, norms that hold their weights less one, a prediction layer of its own
// name. They differ in how the projections of a delta net lie in tensors, and in prefixes.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;
namespace extent = models::extent;
namespace when = models::when;

constexpr HfName kNextDeltaNet[] = {
    {"self_attention.in_proj.weight.{query,key,value,z}", "linear_attn.in_proj_qkvz.weight",
     when::kAlways, extent::kLinearKeyHeads},
    {"self_attention.in_proj.weight.{beta,alpha}", "linear_attn.in_proj_ba.weight", when::kAlways,
     extent::kLinearKeyHeads},
    {"self_attention.conv1d.weight.{query,key,value}", "linear_attn.conv1d.weight"},
    {"self_attention.dt_bias", "linear_attn.dt_bias"},
    {"self_attention.A_log", "linear_attn.A_log"},
    {"self_attention.out_norm.weight", "linear_attn.norm.weight"},
    {"self_attention.out_proj.weight", "linear_attn.out_proj.weight"},
    {"self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"},
};

constexpr HfName kQwen35DeltaNet[] = {
    {"self_attention.in_proj.weight.{query,key,value}", "linear_attn.in_proj_qkv.weight"},
    {"self_attention.in_proj.weight.z", "linear_attn.in_proj_z.weight"},
    {"self_attention.in_proj.weight.beta", "linear_attn.in_proj_b.weight"},
    {"self_attention.in_proj.weight.alpha", "linear_attn.in_proj_a.weight"},
    {"self_attention.conv1d.weight.{query,key,value}", "linear_attn.conv1d.weight"},
    {"self_attention.dt_bias", "linear_attn.dt_bias"},
    {"self_attention.A_log", "linear_attn.A_log"},
    {"self_attention.out_norm.weight", "linear_attn.norm.weight"},
    {"self_attention.out_proj.weight", "linear_attn.out_proj.weight"},
    {"self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"},
};

// Qwen3.5 has each expert of its prediction layer apart, Qwen3.6 has them in one tensor.
constexpr HfName kHybridExperts[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight"},
    kGateUpExperts,
    kDownExperts,
    {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_expert.{gate,up}_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"},
    {"mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"},
};

constexpr HfName kHybridPrediction[] = {
    {"enorm.weight", "pre_fc_norm_embedding.weight"},
    {"hnorm.weight", "pre_fc_norm_hidden.weight"},
    {"eh_proj.weight", "fc.weight"},
    {"final_layernorm.weight", "norm.weight"},
};

constexpr HfNames with_delta_net(std::span<const HfName> delta_net) {
  return {
      .first = kEmbeddingNames,
      .attention = kAttentionNames,
      .linear_attention = delta_net,
      .dense_mlp = kMlpNames,
      .moe_mlp = kHybridExperts,
      .last = kHeadNames,
      .prediction = kHybridPrediction,
      .prediction_own = "mtp.",
      .prediction_layer = "mtp.layers.{l}.",
  };
}
constexpr HfNames kNextNames = with_delta_net(kNextDeltaNet);
constexpr HfNames kQwen35Names = [] {
  auto names = with_delta_net(kQwen35DeltaNet);
  names.experts_together = true;
  return names;
}();
// mbridge has transformers' own module.
constexpr TowerRule kQwen35Mbridge[] = {
    {"model.visual.patch_embed.**", "vision_model.patch_embed.**"},
    {"model.visual.pos_embed.**", "vision_model.pos_embed.**"},
    {"model.visual.blocks.**", "vision_model.blocks.**"},
    {"model.visual.merger.**", "vision_model.merger.**"},
};
constexpr HfNames kQwen35SeeingNames = [] {
  auto names = kQwen35Names;
  names.layer = kSeeingLayer;
  names.first = kSeeingEmbedding;
  names.last = kSeeingHead;
  names.carried = kVisual;
  names.bridge_tower = kQwen3BridgeTower;
  names.mbridge_tower = kQwen35Mbridge;
  return names;
}();

std::vector<bool> linear_layers(const ConfigFields& fields, std::int64_t num_layers) {
  if (auto named =
          layers_of_kind(fields, "layer_types", "linear_attention", "full_attention", num_layers))
    return std::move(*named);
  std::vector<bool> linear;
  const auto every = fields.size("full_attention_interval", 4);
  for (std::int64_t i = 0; i < num_layers; ++i) linear.push_back((i + 1) % every != 0);
  return linear;
}

void read_hybrid(const ConfigFields& fields, TransformerConfig& config) {
  require(!fields.flag("attention_bias", false), ErrorKind::kLayout,
          "{}: attention_bias has no counterpart in Megatron-Core here", fields.source());
  config.linear_attention_freq = linear_layers(fields, config.num_layers);
  config.linear_conv_kernel_dim = fields.size("linear_conv_kernel_dim", 4);
  config.linear_key_head_dim = fields.size("linear_key_head_dim", 128);
  config.linear_value_head_dim = fields.size("linear_value_head_dim", 128);
  config.linear_num_key_heads = fields.size("linear_num_key_heads", 16, kMaxHeads);
  config.linear_num_value_heads = fields.size("linear_num_value_heads", 32, kMaxHeads);
  require(config.linear_num_value_heads % config.linear_num_key_heads == 0, ErrorKind::kCorrupt,
          "{}: linear_num_value_heads {} is no multiple of linear_num_key_heads {}",
          fields.source(), config.linear_num_value_heads, config.linear_num_key_heads);
  config.attention_output_gate = true;
  config.layernorm_zero_centered_gamma = true;
  config.qk_layernorm = true;
}

void read_next_experts(const ConfigFields& fields, TransformerConfig& config) {
  read_hybrid(fields, config);
  read_qwen_experts(fields, config);
  config.moe_router_topk = fields.size("num_experts_per_tok", 10);
  config.moe_router_pre_softmax = !fields.flag("norm_topk_prob", true);
  config.moe_shared_expert_intermediate_size = fields.size("shared_expert_intermediate_size");
  config.moe_shared_expert_gate = true;
}

// Qwen3.5 has experts in every layer and weights whose sum is one, whatever config.json says.
void read_qwen35_experts(const ConfigFields& fields, TransformerConfig& config) {
  read_next_experts(fields, config);
  config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  config.moe_router_topk = fields.size("num_experts_per_tok", 8);
  config.moe_router_pre_softmax = false;
}

// Qwen3-Next's file names no prediction layers, and has one; so has a Qwen3.5 whose file says
// nothing.
constexpr std::string_view kNextPredictionKeys[] = {"num_nextn_predict_layers",
                                                    "mtp_num_hidden_layers"};
constexpr PredictionCount kNextPrediction{.keys = kNextPredictionKeys, .unsaid = 1, .limit = 1};
constexpr std::string_view kQwen35PredictionKeys[] = {"mtp_num_hidden_layers",
                                                      "num_nextn_predict_layers"};
constexpr PredictionCount kQwen35Prediction{.keys = kQwen35PredictionKeys, .unsaid = 1, .limit = 1};
constexpr BridgeModel kNextProvider{
    .settings = R"({"moe_router_load_balancing_type": "global_aux_loss",
                    "moe_aux_loss_coeff": 0.001, "moe_router_dtype": "fp32",
                    "hetereogenous_dist_checkpoint": true})",
    .layer_spec = kExperimentalAttentionSpec,
};
constexpr BridgeModel kQwen35Provider{
    .settings = R"({"mtp_loss_scaling_factor": 0.1, "hetereogenous_dist_checkpoint": true})",
    .layer_spec = kExperimentalAttentionSpec,
};
constexpr BridgeModel kQwen35ExpertsProvider{
    .settings = R"({"moe_router_load_balancing_type": "global_aux_loss",
                    "moe_aux_loss_coeff": 0.001, "mtp_loss_scaling_factor": 0.1,
                    "hetereogenous_dist_checkpoint": true})",
    .layer_spec = kExperimentalAttentionSpec,
};

constexpr std::string_view kQwen35Defaults = R"({"head_dim": 256})";

constexpr Family kHybridList[] = {
    {.model_type = "qwen3_next",
     .names = &kNextNames,
     .defaults = R"({"num_key_value_heads": 2, "head_dim": 256})",
     .rotary_percent = 0.25,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .prediction = kNextPrediction,
     .configure = read_next_experts,
     .describes =
         [](const TransformerConfig& config) {
           return config.has_linear_attention() && config.num_moe_experts > 0;
         },
     .rare = true,
     .bridge = &kNextProvider},
    {.model_type = "qwen3_5_text",
     .names = &kQwen35Names,
     .defaults = kQwen35Defaults,
     .rotary_percent = 0.25,
     .head_classes = HeadClasses::kOfSequences,
     .prediction = kQwen35Prediction,
     .configure = read_hybrid,
     .describes = [](const TransformerConfig& config) { return config.has_linear_attention(); },
     .rare = true,
     .bridge = &kQwen35Provider},
    {.model_type = "qwen3_5_moe_text",
     .names = &kQwen35Names,
     .defaults = kQwen35Defaults,
     .rotary_percent = 0.25,
     .prediction = kQwen35Prediction,
     .configure = read_qwen35_experts,  // Megatron's arguments do not tell it from Qwen3-Next
     .bridge = &kQwen35ExpertsProvider},
    {.model_type = "qwen3_5",
     .names = &kQwen35SeeingNames,
     .config_key = "text_config",
     .defaults = kQwen35Defaults,
     .rotary_percent = 0.25,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .prediction = kQwen35Prediction,
     .configure = read_hybrid,
     .no_bridge = kBridgeNotDescribed},
    {.model_type = "qwen3_5_moe",
     .names = &kQwen35SeeingNames,
     .config_key = "text_config",
     .defaults = kQwen35Defaults,
     .rotary_percent = 0.25,
     .prediction = kQwen35Prediction,
     .configure = read_qwen35_experts,
     .no_bridge = kBridgeNotDescribed},
};

}  // namespace

const std::span<const Family> kHybridFamilies = kHybridList;

}  // namespace ferry::converter
