// MiniMax-M2: Mixtral's experts behind a sigmoid router with a bias, norms of queries and keys over
// all heads, heads that turn in part.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kMiniMaxMoeNames[] = {
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.router.weight", "block_sparse_moe.gate.weight"},
    {"mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"},
    kMixtralGateUpExperts,
    kMixtralDownExperts,
};

constexpr HfNames kMiniMaxNames{
    .first = kEmbeddingNames,
    .attention = kFullNormAttentionNames,
    .moe_mlp = kMiniMaxMoeNames,
    .last = kHeadNames,
    .modules = kMixtralModules,
};

// Its published files name such modules, and hold none.
constexpr std::string_view kMiniMaxPredictionKeys[] = {"num_mtp_modules"};

void read_minimax(const ConfigFields& fields, TransformerConfig& config) {
  require_sigmoid_scores(fields);
  for (const auto* key : {"use_qk_norm", "use_routing_bias"}) {
    require(fields.flag(key, true), ErrorKind::kLayout, "{}: {} is false, which is not handled",
            fields.source(), key);
  }
  require(fields.count("shared_intermediate_size", 0, kMaxSize) == 0, ErrorKind::kLayout,
          "{}: shared_intermediate_size is not 0, which is not handled", fields.source());
  if (const auto rotary = fields.optional_size("rotary_dim"); rotary && config.rotary_percent == 1)
    config.rotary_percent = static_cast<double>(*rotary) / static_cast<double>(config.kv_channels);
  config.qk_layernorm = config.qk_layernorm_full = true;
  config.num_moe_experts = fields.size("num_local_experts", std::nullopt, kMaxExperts);
  config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  config.moe_ffn_hidden_size = config.ffn_hidden_size;
  config.moe_router_topk = fields.size("num_experts_per_tok", 8);
  config.moe_router_score_function = models::ScoreFunction::kSigmoid;
  config.moe_router_enable_expert_bias = true;
}

constexpr BridgeModel kMiniMaxProvider{
    .settings = R"({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001})",
    .layer_spec = R"({"_target_":
        "megatron.bridge.models.minimax_m2.minimax_m2_provider.minimax_m2_layer_spec",
        "_call_": false})",
};

constexpr Family kMiniMax[] = {
    {.model_type = "minimax_m2",
     .shared_model_type = "minimax",  // of the first upload, and of MiniMax-Text-01
     .architecture = "MiniMaxM2ForCausalLM",
     .names = &kMiniMaxNames,
     .defaults = R"({"head_dim": 128})",
     .rotary_base = 5e6,
     .turns_in_part = true,
     .num_experts_key = "num_local_experts",
     .traits = {.moe_router_logits_in_params_dtype = true},
     .prediction = {.keys = kMiniMaxPredictionKeys, .flag = "use_mtp"},
     .configure = read_minimax,
     .describes =
         [](const TransformerConfig& config) {
           return config.qk_layernorm_full && config.moe_router_enable_expert_bias;
         },
     .rare = true,
     .bridge = &kMiniMaxProvider},
};

}  // namespace

const std::span<const Family> kMiniMaxFamilies = kMiniMax;

}  // namespace ferry::converter
