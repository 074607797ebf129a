// Gemma 2, and Gemma 3 and 4, text alone or with towers: norms behind attention and feed-forward,
// layers of local attention between those of global, which turn by other angles, GELU. Gemma 2 and
// 3 multiply by 1 + weight in norms. Gemma 4 has heads of another size in layers of global
// attention, whose keys may be their values, a scalar for each layer, and a second embedding or
// experts beside the feed-forward; Gemma 4 12B (gemma4_unified) has neither, and no towers but
// their projectors.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "converter/families/dense/gemma_provider.h"
#include "converter/families/family.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using models::RopeType;
using models::TransformerConfig;
namespace when = models::when;

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

// Its tower is SigLIP's, which lies a module deeper on the hub, and where transformers 5 saves a
// model whose files had the names of modules.
constexpr ModuleName kGemmaModules[] = {
    kWrappedModules[0],
    kWrappedModules[1],
    {"vision_tower.vision_model.", "model.vision_tower."},
    {"vision_tower.", "model.vision_tower."},
    {"multi_modal_projector.", "model.multi_modal_projector."},
    {"vision_tower.vision_model.", "model.vision_tower.vision_model."},
};

constexpr HfNames kSeeingGemmaNames{
    .layer = kWrappedLayer,
    .first = kWrappedEmbedding,
    .attention = kGemmaAttentionNames,
    .dense_mlp = kGemmaMlpNames,
    .last = kWrappedHead,
    .carried = kVisionTower,
    .modules = kGemmaModules,
    .bridge_tower = kGemmaBridge,
};

constexpr HfName kGemma4Attention[] = {
    {"self_attention_sliding.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight", when::kOwnValues},
    {.parameter = "self_attention_sliding.linear_qkv.weight",
     .hf = "self_attn.q_proj.weight",
     .when = when::kSharedValues,
     .alternative = "self_attn.{q,k,v}_proj.weight",  // files of the hub may hold them unused
     .rest_unused = true},
    {"self_attention_sliding.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention_sliding.q_layernorm.weight", "self_attn.q_norm.weight"},
    {"self_attention_sliding.k_layernorm.weight", "self_attn.k_norm.weight", when::kOwnKeys},
    {.parameter = "self_attention_sliding.k_layernorm.weight",
     .hf = "self_attn.q_norm.weight",
     .when = when::kSharedValues,
     .alternative = "self_attn.k_norm.weight",
     .rest_unused = true},
    {"self_attention_sliding.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
    {"self_attention_sliding.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"},
    {"self_attention_global.linear_qkv.weight", "self_attn.{q,k,v}_proj.weight", when::kOwnValues},
    {"self_attention_global.linear_qkv.weight", "self_attn.{q,k,k}_proj.weight", when::kKeyValues},
    {.parameter = "self_attention_global.linear_qkv.weight",
     .hf = "self_attn.q_proj.weight",
     .when = when::kSharedValues,
     .alternative = "self_attn.{q,k,v}_proj.weight",
     .rest_unused = true},
    {"self_attention_global.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention_global.q_layernorm.weight", "self_attn.q_norm.weight"},
    {"self_attention_global.k_layernorm.weight", "self_attn.k_norm.weight", when::kOwnKeys},
    {.parameter = "self_attention_global.k_layernorm.weight",
     .hf = "self_attn.q_norm.weight",
     .when = when::kSharedValues,
     .alternative = "self_attn.k_norm.weight",
     .rest_unused = true},
    {"self_attention_global.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
    {"self_attention_global.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"},
    {"input_layernorm.weight", "input_layernorm.weight"},
    {"post_self_attn_layernorm.weight", "post_attention_layernorm.weight"},
    {"per_layer_input_gate.weight", "per_layer_input_gate.weight"},
    {"per_layer_projection.weight", "per_layer_projection.weight"},
    {"post_per_layer_input_norm.weight", "post_per_layer_input_norm.weight"},
    {"layer_scalar", "layer_scalar", when::kFusedNorms},
    {"layer_scalar", "layer_scalar", when::kLocalNorms},  // in fp32
};

constexpr HfName kGemma4Mlp[] = {
    {"mlp.linear_fc1.weight", "mlp.{gate,up}_proj.weight"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"},
    {"post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"},
};

// Megatron-Bridge calls the feed-forward shared experts.
constexpr HfName kGemma4Moe[] = {
    {"pre_mlp_layernorm.weight", "pre_feedforward_layernorm_2.weight"},
    {"mlp.router.weight", "router.proj.weight"},
    {"mlp.router.scale", "router.scale"},
    {"mlp.router.per_expert_scale", "router.per_expert_scale"},
    {"mlp.experts.experts.linear_fc1.weight", "experts.gate_up_proj"},
    {"mlp.experts.experts.linear_fc2.weight", "experts.down_proj"},
    {"mlp.post_moe_layernorm.weight", "post_feedforward_layernorm_2.weight"},
    {"pre_shared_expert_layernorm.weight", "pre_feedforward_layernorm.weight"},
    {"mlp.shared_experts.linear_fc1.weight", "mlp.{gate,up}_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mlp.down_proj.weight"},
    {"mlp.post_shared_expert_layernorm.weight", "post_feedforward_layernorm_1.weight"},
    {"post_ffn_layernorm.weight", "post_feedforward_layernorm.weight"},
};

constexpr HfName kGemma4Embedding[] = {
    {"embedding.word_embeddings.weight", "model.embed_tokens.weight"},
    {"per_layer_embedding.weight", "model.embed_tokens_per_layer.weight"},
    {"per_layer_model_proj.weight", "model.per_layer_model_projection.weight"},
    {"per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"},
};
constexpr HfName kSeeingGemma4Embedding[] = {
    {"embedding.word_embeddings.weight", "model.language_model.embed_tokens.weight"},
    {"per_layer_embedding.weight", "model.language_model.embed_tokens_per_layer.weight"},
    {"per_layer_model_proj.weight", "model.language_model.per_layer_model_projection.weight"},
    {"per_layer_proj_norm.weight", "model.language_model.per_layer_projection_norm.weight"},
};

constexpr HfNames kGemma4Names{
    .first = kGemma4Embedding,
    .attention = kGemma4Attention,
    .dense_mlp = kGemma4Mlp,
    .moe_mlp = kGemma4Moe,
    .last = kHeadNames,
};

constexpr std::string_view kGemma4Towers[] = {"model.vision_tower.", "model.embed_vision.",
                                              "model.audio_tower.", "model.embed_audio."};
constexpr TowerRule kGemma4Bridge[] = {
    {"model.vision_tower.**", "vision_tower.**"},
    {"model.embed_vision.**", "embed_vision.**"},
    {"model.audio_tower.**", "audio_tower.**"},
    {"model.embed_audio.**", "embed_audio.**"},
};

constexpr HfNames kSeeingGemma4Names{
    .layer = kSeeingLayer,
    .first = kSeeingGemma4Embedding,
    .attention = kGemma4Attention,
    .dense_mlp = kGemma4Mlp,
    .moe_mlp = kGemma4Moe,
    .last = kSeeingHead,
    .carried = kGemma4Towers,
    .bridge_tower = kGemma4Bridge,
};

// Files name parts of the projector of images otherwise than modules do.
constexpr std::string_view kGemma4UnifiedTowers[] = {"model.vision_embedder.",
                                                     "model.embed_vision.", "model.embed_audio."};
constexpr ModuleName kGemma4UnifiedModules[] = {
    {"model.vision_embedder.patch_", "model.embed_vision.patch_"},
    {"model.vision_embedder.pos_", "model.embed_vision.pos_"},
    {"model.embed_vision.embedding_projection",
     "model.embed_vision.multimodal_embedder.embedding_projection"},
};
constexpr TowerRule kGemma4UnifiedBridge[] = {
    {"model.vision_embedder.**", "vision_embedder.**"},
    {"model.embed_vision.**", "embed_vision.**"},
    {"model.embed_audio.**", "embed_audio.**"},
};

constexpr HfNames kGemma4UnifiedNames{
    .layer = kSeeingLayer,
    .first = kSeeingEmbedding,
    .attention = kGemma4Attention,
    .dense_mlp = kGemma4Mlp,
    .last = kSeeingHead,
    .carried = kGemma4UnifiedTowers,
    .modules = kGemma4UnifiedModules,
    .bridge_tower = kGemma4UnifiedBridge,
};

// All layers but every `every`-th, where layer_types names none.
std::vector<bool> local_layers(const ConfigFields& fields,
                               std::int64_t num_layers,
                               std::int64_t every) {
  return sliding_layers(fields, num_layers,
                        [every](std::int64_t layer) { return (layer + 1) % every != 0; });
}

// transformers 5 writes rope_parameters of each kind of layer, older ones rope_local_base_freq.
double read_gemma_local_base(const ConfigFields& fields) {
  return read_local_base(fields, fields.optional_number("rope_local_base_freq").value_or(10000.0));
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
  config.rotary_base_local = read_gemma_local_base(fields);
  config.attn_logit_softcapping.reset();
  config.qk_layernorm = true;
}

// Its class has no soft cap of logits, which the class of the language model alone has.
void read_seeing_gemma3(const ConfigFields& fields, TransformerConfig& config) {
  read_gemma3(fields, config);
  config.final_logit_softcapping.reset();
}

// per_layer_config by the numbers of layers, which transformers writes in as many digits as the
// last of them has: "05" beside "11".
std::map<std::string, const nlohmann::json*> by_layer(const nlohmann::json& per_layer_config) {
  std::map<std::string, const nlohmann::json*> layers;
  for (const auto& [key, own] : per_layer_config.items()) {
    const auto zeros = key.size() > 1 ? std::min(key.find_first_not_of('0'), key.size() - 1) : 0;
    layers.emplace(key.substr(zeros), &own);
  }
  return layers;
}

// Heads of layers of global attention: global_head_dim, num_global_key_value_heads; transformers 5
// writes what single layers have of their own, per_layer_config.
void read_global_attention(const ConfigFields& fields, TransformerConfig& config) {
  config.attention_k_eq_v = fields.flag("attention_k_eq_v", false);
  config.global_kv_channels = fields.size("global_head_dim", 512);
  config.num_global_query_groups =
      config.attention_k_eq_v
          ? fields.size("num_global_key_value_heads", config.num_query_groups, kMaxHeads)
          : config.num_query_groups;
  if (const auto* const of_layers = fields.find("per_layer_config")) {
    require(of_layers->is_object(), ErrorKind::kCorrupt, "{}: per_layer_config is no object",
            fields.source());
    const nlohmann::json alike = nlohmann::json::object();
    auto layers = by_layer(*of_layers);
    std::optional<TransformerConfig> first;
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      const auto found = layers.extract(fmt::format("{}", layer));
      const ConfigFields own(found ? *found.mapped() : alike,
                             fmt::format("{}: per_layer_config of {}", fields.source(), layer));
      auto read = config;
      read.global_kv_channels = own.size("head_dim", config.kv_channels);
      read.num_global_query_groups =
          own.size("num_key_value_heads", config.num_query_groups, kMaxHeads);
      if (config.window_of(layer)) {
        require(read.global_kv_channels == config.kv_channels &&
                    read.num_global_query_groups == config.num_query_groups,
                ErrorKind::kLayout, "{}: heads differ among layers of {}, which is not handled",
                own.source(), kLocalAttention);
        continue;
      }
      if (!first) first = read;
      require(*first == read, ErrorKind::kLayout,
              "{}: heads differ among layers of {}, which is not handled", own.source(),
              kGlobalAttention);
    }
    require(layers.empty(), ErrorKind::kCorrupt, "{}: per_layer_config of {}, which is no layer",
            fields.source(), layers.empty() ? "" : layers.begin()->first);
    if (first) config = *first;
  }
  require(config.num_attention_heads % config.num_global_query_groups == 0, ErrorKind::kCorrupt,
          "{}: num_attention_heads {} is no multiple of num_global_key_value_heads {}",
          fields.source(), config.num_attention_heads, config.num_global_query_groups);
}

// The first channels of a head turn in layers of global attention, as if all of them did.
void read_proportional_rotary(const ConfigFields& fields, TransformerConfig& config) {
  const auto type = config.rope_scaling.type;
  const bool named = fields.find("rope_parameters") != nullptr;
  require(type == RopeType::kProportional || !named, ErrorKind::kLayout,
          "{}: rope_type of {} is \"{}\", only \"{}\" is handled", fields.source(),
          kGlobalAttention, name_of(type), name_of(RopeType::kProportional));
  require(config.rope_scaling.factor == 1.0 || !named, ErrorKind::kLayout,
          "{}: rope_parameters of {} have the factor {}, which is not handled", fields.source(),
          kGlobalAttention, config.rope_scaling.factor);
  config.global_rotary_percent = named ? config.rotary_percent : 0.25;
  config.rotary_percent = 1.0;
  config.rope_scaling = {};
  config.rotary_base_local = read_gemma_local_base(fields);
}

void read_gemma4_experts(const ConfigFields& fields, TransformerConfig& config) {
  config.num_moe_experts = fields.size("num_experts", std::nullopt, kMaxExperts);
  config.moe_layer_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
  config.moe_shared_expert_intermediate_size = config.ffn_hidden_size;
  config.moe_router_topk = fields.size("top_k_experts");
  config.moe_router_pre_softmax = true;
}

// All of it but a second embedding and experts.
void read_gemma4_layers(const ConfigFields& fields, TransformerConfig& config) {
  require(!fields.flag("attention_bias", false), ErrorKind::kLayout,
          "{}: attention_bias is true, which is not handled", fields.source());
  const auto bidirectional = fields.text("use_bidirectional_attention", "vision");
  require(bidirectional == "vision", ErrorKind::kLayout,
          "{}: use_bidirectional_attention is \"{}\", which is not handled", fields.source(),
          bidirectional);
  config.sliding_window = fields.size("sliding_window", 512);
  config.window_attn_skip_freq = local_layers(fields, config.num_layers, 6);
  config.window_attn_skip_freq.back() = false;  // as transformers does
  read_global_attention(fields, config);
  read_proportional_rotary(fields, config);
  config.num_kv_shared_layers = fields.count("num_kv_shared_layers", 0, config.num_layers - 1);
  config.use_double_wide_mlp = fields.flag("use_double_wide_mlp", false);
  config.softmax_scale = 1.0;
  config.embedding_scaling = true;
  config.final_logit_softcapping = fields.optional_number("final_logit_softcapping");
  config.qk_layernorm = true;
  config.post_norm = models::PostNorm::kOfLayer;
}

void read_gemma4(const ConfigFields& fields, TransformerConfig& config) {
  read_gemma4_layers(fields, config);
  const bool experts = fields.flag("enable_moe_block", false);
  require(!experts || (config.num_kv_shared_layers == 0 && !config.use_double_wide_mlp),
          ErrorKind::kLayout,
          "{}: enable_moe_block beside num_kv_shared_layers or use_double_wide_mlp, which is not "
          "handled",
          fields.source());
  config.per_layer_embed_dim = fields.count("hidden_size_per_layer_input", 256, kMaxSize);
  if (config.per_layer_embed_dim > 0)
    config.per_layer_embed_vocab_size = fields.size("vocab_size_per_layer_input", 262144);
  // Megatron-Bridge has no such model, and would leave the second embedding behind.
  require(!experts || config.per_layer_embed_dim == 0, ErrorKind::kLayout,
          "{}: enable_moe_block beside hidden_size_per_layer_input, which is not handled",
          fields.source());
  if (!experts) return;
  read_gemma4_experts(fields, config);
  config.post_norm = models::PostNorm::kOfLinear;
}

// Its class has no experts and no second embedding, whose absence files of the hub write out.
void read_gemma4_unified(const ConfigFields& fields, TransformerConfig& config) {
  require(!fields.flag("enable_moe_block", false), ErrorKind::kLayout,
          "{}: enable_moe_block is true, which is not handled", fields.source());
  const auto second = fields.count("hidden_size_per_layer_input", 0, kMaxSize);
  require(second == 0, ErrorKind::kLayout,
          "{}: hidden_size_per_layer_input is {}, which is not handled", fields.source(), second);
  read_gemma4_layers(fields, config);
}

// Gemma4TextConfig of transformers.
constexpr std::string_view kGemma4Defaults =
    R"({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 131072})";
// Gemma4UnifiedTextConfig of transformers.
constexpr std::string_view kGemma4UnifiedDefaults =
    R"({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 262144, "sliding_window": 1024})";

constexpr Family kGemma[] = {
    {.model_type = "gemma2",
     .names = &kGemmaNames,
     // Gemma2Config of transformers.
     .defaults = R"({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                     "head_dim": 256})",
     .tied = true,
     .activation = models::Activation::kGeluTanh,
     .head_classes = HeadClasses::kOfSequencesAndTokens,
     .configure = read_gemma2,
     .describes =
         [](const TransformerConfig& config) {
           return config.layernorm_zero_centered_gamma && !config.qk_layernorm &&
                  !config.has_linear_attention() && config.num_moe_experts == 0;
         },
     .rare = true,
     .bridge = &kGemma2Provider},
    {.model_type = "gemma3_text",
     .names = &kGemmaNames,
     .defaults = R"({"head_dim": 256})",
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = models::Activation::kGeluTanh,
     .head_classes = HeadClasses::kOfSequences,
     .configure = read_gemma3,
     .describes =
         [](const TransformerConfig& config) {
           return config.layernorm_zero_centered_gamma && config.qk_layernorm &&
                  config.num_moe_experts == 0;
         },
     .rare = true,
     .bridge = &kGemma3Provider},
    {.model_type = "gemma3",
     .names = &kSeeingGemmaNames,
     .config_key = "text_config",
     // Gemma3TextConfig of transformers: the files of the hub leave these out.
     .defaults = R"({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                     "vocab_size": 262208, "max_position_embeddings": 131072})",
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = models::Activation::kGeluTanh,
     .head_classes = HeadClasses::kOfSequences,
     .configure = read_seeing_gemma3,
     .bridge_seeing = &kGemma3SeeingProvider},
    {.model_type = "gemma4_text",
     .names = &kGemma4Names,
     .defaults = kGemma4Defaults,
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = models::Activation::kGeluTanh,
     .configure = read_gemma4,  // Megatron's arguments do not describe it
     .bridge = &kGemma4Provider},
    {.model_type = "gemma4",
     .names = &kSeeingGemma4Names,
     .config_key = "text_config",
     .defaults = kGemma4Defaults,
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = models::Activation::kGeluTanh,
     .configure = read_gemma4,
     .no_bridge = kBridgeNotDescribed},
    {.model_type = "gemma4_unified_text",
     .names = &kGemma4Names,
     .defaults = kGemma4UnifiedDefaults,
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = models::Activation::kGeluTanh,
     .configure = read_gemma4_unified},
    {.model_type = "gemma4_unified",
     .names = &kGemma4UnifiedNames,
     .config_key = "text_config",
     .defaults = kGemma4UnifiedDefaults,
     .rotary_base = 1e6,
     .tied = true,
     .rope_of_layers = true,
     .activation = models::Activation::kGeluTanh,
     .configure = read_gemma4_unified},
};

}  // namespace

const std::span<const Family> kGemmaFamilies = kGemma;

}  // namespace ferry::converter
