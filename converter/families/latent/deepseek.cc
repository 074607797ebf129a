// DeepSeek-V2, DeepSeek-V3, Moonlight, Kimi K2 and K2.5, GLM-4.7-Flash: multi-head latent
// attention, fine-grained and shared experts; all but V2 have routers with a bias, and prediction
// layers. DeepSeek-V3.2 and GLM-5: the same with an indexer, which chooses the keys of a query.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converter/families/family.h"
#include "distckpt/base/error.h"

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
    {"self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"},
    {"self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"},
    {"self_attention.core_attention.indexer.linear_wq_b.weight", "self_attn.indexer.wq_b.weight"},
    {"self_attention.core_attention.indexer.linear_wk.weight", "self_attn.indexer.wk.weight"},
    {"self_attention.core_attention.indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"},
    {"self_attention.core_attention.indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"},
    {"self_attention.core_attention.indexer.linear_weights_proj.weight",
     "self_attn.indexer.weights_proj.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
};

constexpr std::string_view kNumExperts = "n_routed_experts";

constexpr HfNames kDeepSeekNames{
    .first = kEmbeddingNames,
    .attention = kLatentAttentionNames,
    .dense_mlp = kMlpNames,
    .moe_mlp = kDeepSeekMoeNames,
    .last = kHeadNames,
    .prediction = kDeepSeekPredictionNames,
    .prediction_copies = kDeepSeekPredictionCopies,
};

constexpr std::string_view kKimiVision[] = {"vision_tower.", "mm_projector."};
constexpr TowerRule kKimiBridge[] = {
    {"vision_tower.**", "vision_tower.**"},
    {"mm_projector.**", "mm_projector.**"},
};
constexpr HfCopy kKimiPredictionCopies[] = {
    {"embed_tokens.weight", "language_model.model.embed_tokens.weight"},
    {"shared_head.head.weight", "language_model.lm_head.weight"},
};
constexpr HfNames kSeeingKimiNames = [] {
  auto names = kDeepSeekNames;
  names.layer = kWrappedLayer;
  names.first = kWrappedEmbedding;
  names.last = kWrappedHead;
  names.prediction_copies = kKimiPredictionCopies;
  names.carried = kKimiVision;
  names.modules = std::span(kWrappedModules).first<2>();  // its tower has other modules, too
  names.bridge_tower = kKimiBridge;
  return names;
}();

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

// One of its methods alone limits tokens to groups of experts.
void read_deepseek_v2(const ConfigFields& fields, TransformerConfig& config) {
  read_deepseek(fields, config);
  if (fields.text("topk_method", "greedy") != "group_limited_greedy")
    config.moe_router_num_groups = config.moe_router_group_topk = 0;
}

void read_biased_router(const ConfigFields& fields, TransformerConfig& config) {
  require_normed_weights(fields);
  require_sigmoid_scores(fields);
  read_deepseek(fields, config);
  config.moe_router_score_function = models::ScoreFunction::kSigmoid;
  config.moe_router_enable_expert_bias = fields.text("topk_method", "noaux_tc") == "noaux_tc";
}

void read_deepseek_v3(const ConfigFields& fields, TransformerConfig& config) {
  require(fields.flag("rope_interleave", !fields.is_null("rope_interleave")), ErrorKind::kLayout,
          "{}: rope_interleave is false, which is not handled", fields.source());
  read_biased_router(fields, config);
}

// The layers of GLM-5.2 that have an indexer of their own: listed, under either key, or spelled as
// a pattern (FSSF), or every index_topk_freq-th, as transformers reads them
// (configuration_glm_moe_dsa.py).
std::vector<bool> layers_with_indexer(const ConfigFields& fields, std::int64_t num_layers) {
  constexpr std::string_view kOfItsOwn = "full";
  constexpr std::string_view kTaken = "shared";
  if (const auto listed = layers_of_kind(fields, "indexer_types", kOfItsOwn, kTaken, num_layers))
    return *listed;
  constexpr std::string_view kPattern = "index_topk_pattern";
  if (const auto* list = fields.find(kPattern); list != nullptr && list->is_array())
    return layers_of_kind(fields, kPattern, kOfItsOwn, kTaken, num_layers).value();
  const auto pattern = fields.text(kPattern, "");
  const bool fits = pattern.empty() || (std::ssize(pattern) == num_layers &&
                                        pattern.find_first_not_of("FS") == std::string::npos);
  require(fits, ErrorKind::kCorrupt,
          "{}: index_topk_pattern is \"{}\", expected a letter F or S for each of {} layers",
          fields.source(), pattern, num_layers);
  constexpr std::int64_t kMost = 1'000'000;  // an offset behind the last layer: all have one
  const auto freq = std::max<std::int64_t>(fields.count("index_topk_freq", 1, kMost), 1);
  const auto offset = fields.count("index_skip_topk_offset", 2, kMost);
  std::vector<bool> own;
  for (std::int64_t i = 0; i < num_layers; ++i) {
    own.push_back(pattern.empty() ? std::max<std::int64_t>(i - offset + 1, 0) % freq == 0
                                  : pattern[static_cast<std::size_t>(i)] == 'F');
  }
  return own;
}

// Megatron-Core's two settings for these layers: the first ones up to the offset have indexers, and
// of those behind it every freq-th.
void set_shared_indexers(const std::vector<bool>& own,
                         std::string_view source,
                         TransformerConfig& config) {
  const auto taken = std::ranges::find(own, false);
  if (taken == own.end()) return;
  const auto next = std::find(taken, own.end(), true);
  config.dsa_indexer_skip_topk_offset = taken - own.begin();
  config.dsa_indexer_topk_freq = next - taken + 1;
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    require(config.has_indexer(i) == own[static_cast<std::size_t>(i)], ErrorKind::kLayout,
            "{}: layer {} {} an indexer, which dsa_indexer_topk_freq and "
            "dsa_indexer_skip_topk_offset of Megatron-Core cannot say",
            source, i, own[static_cast<std::size_t>(i)] ? "has" : "lacks");
  }
}

void read_sparse(const ConfigFields& fields, TransformerConfig& config) {
  read_biased_router(fields, config);
  config.dsa_indexer_n_heads = fields.size("index_n_heads", std::nullopt, kMaxHeads);
  config.dsa_indexer_head_dim = fields.size("index_head_dim");
  config.dsa_indexer_topk = fields.size("index_topk");
  set_shared_indexers(layers_with_indexer(fields, config.num_layers), fields.source(), config);
}

bool describes_sparse(const TransformerConfig& config) {
  return config.is_sparse();
}

// DeepSeek-V4: compressed attention and hyper-connections, whose parameters the table lacks.
constexpr HfNames kUnmapped{};

constexpr BridgeModel kDeepSeekV2Provider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32"})",
    .layer_spec = kDecoderBlockSpec,
};
constexpr BridgeModel kDeepSeekV3Provider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0001,
                    "moe_router_dtype": "fp32"})",
    .layer_spec = kDecoderBlockSpec,
};
constexpr BridgeModel kKimiProvider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001,
                    "moe_router_dtype": "fp32"})",
    .layer_spec = kDecoderBlockSpec,
};
constexpr BridgeModel kGlmLiteProvider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001,
                    "moe_router_dtype": "fp32", "moe_router_bias_update_rate": 0,
                    "mtp_loss_scaling_factor": 0.3})",
    .layer_spec = kDecoderBlockSpec,
};

// GLM-5. Its prediction layer is left behind: Megatron-Bridge's model has none.
constexpr BridgeModel kGlmSparseProvider{
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32",
                    "cp_comm_type": "allgather", "dsa_indexer_rope_interleaved": true,
                    "dsa_indexer_rotate_activation": false, "dsa_indexer_k_norm_epsilon": 1e-6,
                    "dsa_indexer_loss_coeff": 0.001, "dsa_indexer_use_sparse_loss": true})",
    .layer_spec = kExperimentalAttentionSpec,
    .configure = [](const TransformerConfig& /*config*/,
                    nlohmann::ordered_json& provider) { provider["mtp_num_layers"] = nullptr; },
};

constexpr std::string_view kDeepSeekDefaults =
    R"({"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "n_shared_experts": 1})";

constexpr Family kDeepSeek[] = {
    {.model_type = "deepseek_v2",
     .names = &kDeepSeekNames,
     .defaults = R"({"n_shared_experts": 2})",
     .num_experts_key = kNumExperts,
     .traits = {.rotary_in_fp32 = true},
     .head_classes = HeadClasses::kOfSequences,
     .configure = read_deepseek_v2,
     .describes =
         [](const TransformerConfig& config) {
           return config.multi_latent_attention && !config.moe_router_enable_expert_bias;
         },
     .bridge = &kDeepSeekV2Provider},
    {.model_type = "deepseek_v3",
     .names = &kDeepSeekNames,
     .defaults = kDeepSeekDefaults,
     .num_experts_key = kNumExperts,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .prediction = kNextnPrediction,
     .configure = read_deepseek_v3,
     .describes =
         [](const TransformerConfig& config) {
           return config.multi_latent_attention && config.moe_router_enable_expert_bias;
         },
     .bridge = &kDeepSeekV3Provider},
    {.model_type = "kimi_k2",
     .names = &kDeepSeekNames,
     .defaults = kDeepSeekDefaults,
     .num_experts_key = kNumExperts,
     .prediction = kNextnPrediction,
     .configure = read_deepseek_v3,
     .bridge = &kKimiProvider},
    {.model_type = "kimi_k25",
     .names = &kSeeingKimiNames,
     .config_key = "text_config",
     .defaults = kDeepSeekDefaults,
     .num_experts_key = kNumExperts,
     .prediction = kNextnPrediction,
     .configure = read_deepseek_v3,
     .no_bridge = kBridgeNotDescribed},
    {.model_type = "glm4_moe_lite",
     .names = &kDeepSeekNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "routed_scaling_factor": 1.8,
                     "num_experts_per_tok": 4, "first_k_dense_replace": 1,
                     "n_shared_experts": 1})",
     .turns_in_part = true,
     .num_experts_key = kNumExperts,
     .prediction = kNextnPrediction,
     .configure = read_deepseek_v3,
     .bridge = &kGlmLiteProvider},
    {.model_type = "deepseek_v32",
     .names = &kDeepSeekNames,
     .defaults = kDeepSeekDefaults,
     .num_experts_key = kNumExperts,
     .prediction = kNextnPrediction,
     .configure = read_sparse,
     .describes = describes_sparse,
     .rare = true},
    {.model_type = "glm_moe_dsa",
     .names = &kDeepSeekNames,
     .defaults = R"({"rms_norm_eps": 1e-05, "routed_scaling_factor": 2.5,
                     "first_k_dense_replace": 3, "n_shared_experts": 1})",
     .num_experts_key = kNumExperts,
     .prediction = kNextnPrediction,
     .configure = read_sparse,
     .bridge = &kGlmSparseProvider},
    {.model_type = "deepseek_v4",
     .names = &kUnmapped,
     .traits = {.not_computed = "compressed attention and hyper-connections"},
     .passes_through = true},
};

}  // namespace

const std::span<const Family> kDeepSeekFamilies = kDeepSeek;

}  // namespace ferry::converter
