// Nemotron-H and Nemotron-3: layers of one module each, a Mamba-2 mixer, attention that knows no
// positions, a feed-forward or experts, in the order that a pattern says; squared ReLU without a
// gate; experts of a latent width in Nemotron-3.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "converter/families/family.h"
#include "converter/families/megatron_args.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr HfName kNemotronEmbedding[] = {
    {"embedding.word_embeddings.weight", "backbone.embeddings.weight"},
};
constexpr HfName kNemotronAttention[] = {
    {"self_attention.linear_qkv.weight", "mixer.{q,k,v}_proj.weight"},
    {"self_attention.linear_proj.weight", "mixer.o_proj.weight"},
    {"self_attention.linear_qkv.layer_norm_weight", "norm.weight"},
};
constexpr HfName kNemotronMamba[] = {
    {"mixer.in_proj.weight.{z,x,B,C,dt}", "mixer.in_proj.weight"},
    {"mixer.conv1d.weight.{x,B,C}", "mixer.conv1d.weight"},
    {"mixer.conv1d.bias.{x,B,C}", "mixer.conv1d.bias"},
    {"mixer.dt_bias", "mixer.dt_bias"},
    {"mixer.A_log", "mixer.A_log"},
    {"mixer.D", "mixer.D"},
    {"mixer.norm.weight", "mixer.norm.weight"},
    {"mixer.out_proj.weight", "mixer.out_proj.weight"},
    {"mixer.in_proj.layer_norm_weight", "norm.weight"},
};
constexpr HfName kNemotronMlp[] = {
    {"mlp.linear_fc1.weight", "mixer.up_proj.weight"},
    {"mlp.linear_fc2.weight", "mixer.down_proj.weight"},
    {"mlp.linear_fc1.layer_norm_weight", "norm.weight"},
};
constexpr HfName kNemotronMoe[] = {
    {"pre_mlp_layernorm.weight", "norm.weight"},
    {"mlp.router.weight", "mixer.gate.weight"},
    {"mlp.router.expert_bias", "mixer.gate.e_score_correction_bias"},
    {.parameter = "mlp.experts.experts.linear_fc1.weight",
     .hf = "mixer.experts.{e}.up_proj.weight",
     .alternative = "mixer.experts.up_proj"},
    {.parameter = "mlp.experts.experts.linear_fc2.weight",
     .hf = "mixer.experts.{e}.down_proj.weight",
     .alternative = "mixer.experts.down_proj"},
    {"mlp.fc1_latent_proj.weight", "mixer.fc1_latent_proj.weight"},
    {"mlp.fc2_latent_proj.weight", "mixer.fc2_latent_proj.weight"},
    {"mlp.shared_experts.linear_fc1.weight", "mixer.shared_experts.up_proj.weight"},
    {"mlp.shared_experts.linear_fc2.weight", "mixer.shared_experts.down_proj.weight"},
};
constexpr HfName kNemotronHead[] = {
    {"decoder.final_norm.weight", "backbone.norm_f.weight"},
    {"output_layer.weight", "lm_head.weight", models::when::kUntied},
};
constexpr HfName kNemotronPrediction[] = {
    {"enorm.weight", "enorm.weight"},
    {"hnorm.weight", "hnorm.weight"},
    {"eh_proj.weight", "eh_proj.weight"},
    {"final_layernorm.weight", "final_layernorm.weight"},
};
constexpr ModuleName kNemotronModules[] = {{"backbone.", "model."}};
constexpr HfNames kNemotronNames{
    .layer = "backbone.layers.{l}.",
    .first = kNemotronEmbedding,
    .attention = kNemotronAttention,
    .mamba = kNemotronMamba,
    .dense_mlp = kNemotronMlp,
    .moe_mlp = kNemotronMoe,
    .last = kNemotronHead,
    .prediction = kNemotronPrediction,
    .prediction_own = "mtp.layers.{l}.",
    .prediction_layer = "mtp.layers.{l}.",
    .modules = kNemotronModules,
};

// The kinds of layers that a list names, in older and newer words, as letters.
constexpr std::array<std::pair<std::string_view, char>, 6> kKinds{{
    {"linear_attention", 'M'},
    {"mamba", 'M'},
    {"full_attention", '*'},
    {"attention", '*'},
    {"mlp", '-'},
    {"moe", 'E'},
}};

// The pattern that config.json holds under `key`, or as the list `list_key`; empty without both.
std::string read_pattern(const ConfigFields& fields,
                         std::string_view key,
                         std::string_view list_key) {
  auto pattern = fields.text(key, "");
  if (const auto* list = fields.find(list_key); list != nullptr && pattern.empty()) {
    require(list->is_array(), ErrorKind::kCorrupt, "{}: {} is no list", fields.source(), list_key);
    for (const auto& entry : *list) {
      const auto kind = distckpt::json_string(entry, list_key, fields.source());
      const auto* const found =
          std::ranges::find(kKinds, kind, &decltype(kKinds)::value_type::first);
      require(found != kKinds.end(), ErrorKind::kLayout,
              "{}: {} names \"{}\", which is not handled", fields.source(), list_key, kind);
      pattern += found->second;
    }
  }
  require(pattern.find_first_not_of(models::kHybridLetters) == std::string::npos,
          ErrorKind::kLayout, "{}: {} is \"{}\", of which \"{}\" are handled", fields.source(), key,
          pattern, models::kHybridLetters);
  return pattern;
}

void read_nemotron_experts(const ConfigFields& fields, TransformerConfig& config) {
  require_normed_weights(fields);
  config.num_moe_experts = fields.size("n_routed_experts", std::nullopt, kMaxExperts);
  for (const char letter : config.hybrid_layer_pattern)
    config.moe_layer_freq.push_back(letter == 'E');
  config.moe_ffn_hidden_size = fields.size("moe_intermediate_size");
  config.moe_shared_expert_intermediate_size = fields.size("moe_shared_expert_intermediate_size");
  config.moe_latent_size = fields.optional_size("moe_latent_size").value_or(0);
  config.moe_router_topk = fields.size("num_experts_per_tok", 2);
  config.moe_router_score_function = models::ScoreFunction::kSigmoid;
  config.moe_router_enable_expert_bias = true;
  read_expert_groups(fields, config);
}

void read_nemotron(const ConfigFields& fields, TransformerConfig& config) {
  for (const auto* key : {"attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"}) {
    require(!fields.flag(key, false), ErrorKind::kLayout, "{}: {} is true, which is not handled",
            fields.source(), key);
  }
  require(fields.flag("use_conv_bias", true), ErrorKind::kLayout,
          "{}: use_conv_bias is false, and Megatron-Core's Mamba layers have such a bias",
          fields.source());
  const auto activation = fields.text("mamba_hidden_act", "silu");
  require(activation == "silu", ErrorKind::kLayout,
          "{}: mamba_hidden_act is \"{}\", and Megatron-Core's Mamba layers have \"silu\"",
          fields.source(), activation);
  config.linear_conv_kernel_dim = fields.size("conv_kernel", kMambaKernel);
  require(config.linear_conv_kernel_dim == kMambaKernel, ErrorKind::kLayout,
          "{}: conv_kernel is {}, and that of Megatron-Core's Mamba layers is {}", fields.source(),
          config.linear_conv_kernel_dim, kMambaKernel);
  config.hybrid_layer_pattern =
      read_pattern(fields, "hybrid_override_pattern", "layers_block_type");
  require(std::ssize(config.hybrid_layer_pattern) == config.num_layers, ErrorKind::kCorrupt,
          "{}: {} kinds of layers (hybrid_override_pattern, layers_block_type) for {} layers",
          fields.source(), config.hybrid_layer_pattern.size(), config.num_layers);
  config.kv_channels = fields.size("head_dim", fields.size("attention_head_dim", 128));
  // Its class in transformers ties nothing, whatever tie_word_embeddings says.
  config.untie_embeddings_and_output_weights = true;
  config.layernorm_epsilon = fields.optional_number("layer_norm_epsilon").value_or(1e-5);
  config.gated_linear_unit = false;
  config.mamba_num_heads = fields.size("mamba_num_heads", std::nullopt, kMaxHeads);
  config.mamba_head_dim = fields.size("mamba_head_dim");
  config.mamba_num_groups = fields.size("n_groups", 8, kMaxHeads);
  config.mamba_state_dim = fields.size("ssm_state_size");
  if (config.mtp_num_layers > 0) {
    config.mtp_hybrid_override_pattern =
        read_pattern(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type");
    require(!config.mtp_hybrid_override_pattern.empty(), ErrorKind::kCorrupt,
            "{}: num_nextn_predict_layers without mtp_hybrid_override_pattern", fields.source());
  }
  if (config.hybrid_layer_pattern.find('E') != std::string::npos)
    read_nemotron_experts(fields, config);
}

constexpr BridgeModel kNemotronProvider{
    .provider = "hybrid.hybrid_provider.HybridModelProvider",
    .settings = R"({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0001,
                    "moe_router_dtype": "fp32", "first_last_layers_bf16": true})",
    .configure =
        [](const TransformerConfig& config, nlohmann::ordered_json& provider) {
          provider["hybrid_layer_pattern"] = config.hybrid_layer_pattern;
          if (config.mtp_num_layers == 0) return;
          provider["mtp_hybrid_override_pattern"] = config.mtp_hybrid_override_pattern;
          provider["mtp_use_repeated_layer"] = true;
          provider["keep_mtp_spec_in_bf16"] = true;
          provider["mtp_loss_scaling_factor"] = 0.3;
        },
};

constexpr Family kNemotron[] = {
    {.model_type = "nemotron_h",
     .names = &kNemotronNames,
     .activation = models::Activation::kSquaredRelu,
     .num_experts_key = "n_routed_experts",
     // Megatron-Bridge knows no more than one either: more of them share their weights there.
     .prediction = {.keys = kNextnLayers, .limit = 1},
     .configure = read_nemotron,
     .describes = [](const TransformerConfig& config) { return config.is_hybrid_model(); },
     .rare = true,
     .bridge = &kNemotronProvider},
};

}  // namespace

const std::span<const Family> kNemotronFamilies = kNemotron;

}  // namespace ferry::converter
