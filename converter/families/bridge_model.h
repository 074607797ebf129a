// The model that Megatron-Bridge makes of a family, as far as Megatron-LM's arguments do not say
// it: the part of run_config.yaml (write/run_config.h) that a family's file describes.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "models/spec/transformer_config.h"

namespace ferry::converter {

struct BridgeModel {
  // The class, below megatron.bridge.models. Empty: GPTModelProvider, or MLAModelProvider of latent
  // attention.
  std::string_view provider{};
  std::string_view experts_provider{};  // that of a model with experts, where it is another
  // JSON: fields that all models of the family have, where no argument says otherwise.
  std::string_view settings = "{}";
  // JSON of the function that makes the layers. Empty: the provider's own.
  std::string_view layer_spec{};
  // Sets fields, in place of those that the arguments gave, and removes such.
  void (*configure)(const models::TransformerConfig& config,
                    nlohmann::ordered_json& provider) = nullptr;
  // The reason why Megatron-Bridge cannot make a model of the family; empty if it can.
  std::string_view (*problem)(const models::TransformerConfig& config) = nullptr;
  // A way to scale positions that the class has, though Megatron-LM has no argument for it.
  models::RopeType rope_type = models::RopeType::kDefault;
  // The class of vision_config, below transformers.models, of a model that also sees.
  std::string_view vision_config{};
  bool mrope = false;  // its positions have three axes
};

inline constexpr BridgeModel kPlainBridgeModel{};

// The reason for families whose models Megatron-Bridge has.
inline constexpr std::string_view kBridgeNotDescribed = "Ferry writes none for this family yet";

inline constexpr std::string_view kDecoderBlockSpec =
    R"({"_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
        "_partial_": true, "_args_": [], "use_transformer_engine": true})";
inline constexpr std::string_view kExperimentalAttentionSpec =
    R"({"_target_": "megatron.core.models.gpt.experimental_attention_variant_module_specs.)"
    R"(get_transformer_block_with_experimental_attention_variant_spec", "_call_": false})";

}  // namespace ferry::converter
