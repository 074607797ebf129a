// Megatron-Bridge's models count the layers of local attention by themselves.
#include "converter/families/dense/gemma_provider.h"

#include <nlohmann/json.hpp>

#include "converter/families/megatron_args.h"

namespace ferry::converter {
namespace {

using models::RopeType;
using models::TransformerConfig;

constexpr std::string_view kNoScale =
    "Megatron's arguments do not say how it scales attention: name its config.json";

void configure_gemma3(const TransformerConfig& config, nlohmann::ordered_json& provider) {
  provider.erase("window_attn_skip_freq");
  const auto every = period_of_windows(config.window_attn_skip_freq).value_or(1);
  provider["interleaved_attn_pattern"] = {every - 1, 1};
  provider["window_size"] = config.sliding_window.value_or(0);
  provider["softmax_scale"] = config.softmax_scale.value_or(1.0);
  provider["rotary_base"] = {config.rotary_base_local.value_or(config.rotary_base),
                             config.rotary_base};
  // Angles of local attention are not scaled.
  provider["seq_len_interpolation_factor"] = nullptr;
  provider["rope_scaling_factor"] = config.rope_scaling.factor;
}

std::string_view problem_of_gemma3(const TransformerConfig& config) {
  if (!config.softmax_scale) return kNoScale;
  const auto scaling = config.rope_scaling.type;
  if (scaling != RopeType::kDefault && scaling != RopeType::kLinear)
    return "scales positions in a way that its model does not";
  return period_of_windows(config.window_attn_skip_freq)
             ? ""
             : "layers of local and of global attention do not alternate by a number";
}

void configure_gemma4_experts(const TransformerConfig& config, nlohmann::ordered_json& provider) {
  configure_gemma3(config, provider);
  provider.erase("rope_scaling_factor");
  provider["global_head_dim"] = config.global_kv_channels;
  provider["num_global_key_value_heads"] = config.num_global_query_groups;
  provider["global_rotary_percent"] = config.global_rotary_percent;
  provider["moe_layer_freq"] = 1;
  provider["moe_shared_expert_overlap"] = false;
  provider["moe_shared_expert_gate"] = false;
}

void configure_gemma4_dense(const TransformerConfig& config, nlohmann::ordered_json& provider) {
  provider["window_attn_skip_freq"] = config.window_attn_skip_freq;
  provider["window_size"] = {config.sliding_window.value_or(1) - 1, 0};
  provider["global_kv_channels"] = config.global_kv_channels;
  provider["num_global_query_groups"] = config.num_global_query_groups;
  provider["sliding_window_rope_base"] = config.rotary_base_local.value_or(config.rotary_base);
  provider["full_attention_rope_base"] = config.rotary_base;
  provider["full_attention_rope_partial_factor"] = config.global_rotary_percent;
  provider["num_kv_shared_layers"] = config.num_kv_shared_layers;
  provider["use_double_wide_mlp"] = config.use_double_wide_mlp;
  provider["per_layer_embed_dim"] = config.per_layer_embed_dim;
  provider["per_layer_embed_vocab_size"] =
      config.per_layer_embed_dim > 0 ? config.per_layer_embed_vocab_size : config.vocab_size;
}

}  // namespace

const BridgeModel kGemma2Provider{
    .provider = "gemma.gemma2_provider.Gemma2ModelProvider",
    .configure =
        [](const TransformerConfig& config, nlohmann::ordered_json& provider) {
          provider.erase("window_attn_skip_freq");
          const auto scale = config.softmax_scale.value_or(1.0);
          provider["query_pre_attn_scalar"] = 1.0 / (scale * scale);
          provider["attn_logit_softcapping"] = config.attn_logit_softcapping.value_or(0.0);
          provider["final_logit_softcapping"] = config.final_logit_softcapping.value_or(0.0);
        },
    .problem = [](const TransformerConfig& config) -> std::string_view {
      if (!config.softmax_scale) return kNoScale;
      if (config.rope_scaling.type != RopeType::kDefault)
        return "scales positions, which its model does not";
      return period_of_windows(config.window_attn_skip_freq) == 2
                 ? ""
                 : "local attention is not that of every other layer";
    },
};

const BridgeModel kGemma3Provider{
    .provider = "gemma.gemma3_provider.Gemma3ModelProvider",
    .configure = configure_gemma3,
    .problem = problem_of_gemma3,
};

// The file of the hub leaves out that the vision tower has no head, which Megatron-Bridge's never
// has; its projector is a module with sizes of its own.
const BridgeModel kGemma3SeeingProvider{
    .provider = "gemma_vl.gemma3_vl_provider.Gemma3VLModelProvider",
    .configure =
        [](const TransformerConfig& config, nlohmann::ordered_json& provider) {
          configure_gemma3(config, provider);
          auto& vision = provider["vision_config"]["config_dict"];
          vision["vision_use_head"] = false;
          provider["vision_projector_config"] = {
              {"_target_",
               "megatron.bridge.models.gemma_vl.modeling_gemma3_vl."
               "Gemma3VLMultimodalProjectorConfig"},
              {"input_size", vision.value("hidden_size", nlohmann::ordered_json(768))},
              {"hidden_size", config.hidden_size}};
        },
    .problem = problem_of_gemma3,
    .vision_config = "siglip.configuration_siglip.SiglipVisionConfig",
};

const BridgeModel kGemma4Provider{
    .provider = "gemma.gemma4_provider.Gemma4DenseProvider",
    .experts_provider = "gemma.gemma4_provider.Gemma4ModelProvider",
    .configure =
        [](const TransformerConfig& config, nlohmann::ordered_json& provider) {
          const bool experts = config.num_moe_experts > 0;
          (experts ? configure_gemma4_experts : configure_gemma4_dense)(config, provider);
          provider["attention_k_eq_v"] = config.attention_k_eq_v;
          provider["final_logit_softcapping"] =
              config.final_logit_softcapping
                  ? nlohmann::ordered_json(*config.final_logit_softcapping)
                  : nlohmann::ordered_json();
        },
    .problem = [](const TransformerConfig& config) -> std::string_view {
      const bool counted =
          config.num_moe_experts == 0 || period_of_windows(config.window_attn_skip_freq);
      return counted ? "" : "layers of local and of global attention do not alternate by a number";
    },
    .rope_type = RopeType::kProportional,
};

}  // namespace ferry::converter
