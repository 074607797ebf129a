// ERNIE 4.5, dense and with experts: channels turn with their neighbours; a router's bias is a row.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kErnieMoeNames[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "mlp.gate.weight", models::when::kFp32Router},
    {.parameter = "mlp.router.expert_bias",
     .hf = "mlp.moe_statics.e_score_correction_bias",
     .as_row = true},
    kGateUpExperts,
    kDownExperts,
    {"mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.{gate,up}_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"},
};

constexpr ModuleName kErnieModules[] = {{".mlp.moe_statics.", ".mlp.gate.moe_statics."}};
constexpr HfNames kErnieNames{
    .first = kEmbeddingNames,
    .attention = kAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kErnieMoeNames,
    .last = kHeadNames,
    .modules = kErnieModules,
};

// The prediction layer is of other parts, and transformers leaves it out.
constexpr std::string_view kErniePrediction[] = {
    "model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj."};

void read_ernie(const ConfigFields& fields, TransformerConfig& config) {
  config.add_bias_linear = fields.flag("use_bias", false);
  config.rotary_interleaved = true;
}

void read_ernie_experts(const ConfigFields& fields, TransformerConfig& config) {
  read_ernie(fields, config);
  require(!config.add_bias_linear, ErrorKind::kLayout,
          "{}: use_bias is true, which is not handled with experts", fields.source());
  config.num_moe_experts = fields.size("moe_num_experts", 64, kMaxExperts);
  const auto start = fields.count("moe_layer_start_index", 1, kMaxLayers);
  const auto interval = fields.size("moe_layer_interval", 1);
  // -1: the last layer.
  const auto end = fields.optional_number("moe_layer_end_index").value_or(-1);
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    config.moe_layer_freq.push_back((i + 1) % interval == 0 && i >= start &&
                                    (end < 0 || static_cast<double>(i) <= end));
  }
  config.moe_ffn_hidden_size = fields.size("moe_intermediate_size", 1536);
  config.moe_shared_expert_intermediate_size =
      fields.count("moe_num_shared_experts", 2, kMaxExperts) * config.moe_ffn_hidden_size;
  config.moe_router_topk = fields.size("moe_k", 6);
  config.moe_router_pre_softmax = true;
  config.moe_router_enable_expert_bias = true;
  config.moe_router_norm_min = fields.optional_number("moe_norm_min").value_or(1e-12);
}

bool is_ernie(const TransformerConfig& config) {
  return config.rotary_interleaved && !config.multi_latent_attention && !config.qk_layernorm &&
         config.post_norm == models::PostNorm::kNone;
}

constexpr Family kErnie[] = {
    {.model_type = "ernie4_5",
     .names = &kErnieNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "num_key_value_heads": 2})",
     .rotary_base = 5e5,
     .tied = true,
     .traits = {.rotary_in_fp32 = true},
     .configure = read_ernie,
     .describes =
         [](const TransformerConfig& config) {
           return is_ernie(config) && config.num_moe_experts == 0;
         },
     .rare = true},
    {.model_type = "ernie4_5_moe",
     .names = &kErnieNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "num_key_value_heads": 4})",
     .rotary_base = 5e5,
     .tied = true,
     .num_experts_key = "moe_num_experts",
     .traits = {.rotary_in_fp32 = true, .moe_router_parameter_in_fp32 = true},
     .prediction = {.keys = kNextnLayers, .carried = kErniePrediction},
     .configure = read_ernie_experts,
     .describes =
         [](const TransformerConfig& config) {
           return is_ernie(config) && config.moe_router_enable_expert_bias;
         },
     .rare = true,
     .no_bridge = "its routers have a bias beside a softmax, which megatron-core refuses"},
};

}  // namespace

const std::span<const Family> kErnieFamilies = kErnie;

}  // namespace ferry::converter
