// The training arguments of Megatron-LM that are a member of TransformerConfig as it is. One row
// reads, writes and compares each; megatron_args.cc holds what else there is to say.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

#include "converter/families/config_limits.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// The comparison of arguments with a configuration from elsewhere (require_same_model()).
enum class Compared : std::uint8_t {
  kAlways,
  kIfSet,  // where it is not `otherwise`: others save arguments that they leave at their default
  kNever,
};

template <typename T>
struct MegatronField {
  std::string_view argument;
  T models::TransformerConfig::*member = nullptr;
  std::optional<T>
      otherwise{};  // the value where the argument is absent or None; else it is an error
  std::int64_t limit = kMaxSize;  // of a size, which is at least 1 if it has to be there
  bool none_if_zero = false;      // written as None
  Compared compared = Compared::kAlways;
};
using SizeField = MegatronField<std::int64_t>;
using FlagField = MegatronField<bool>;
using NumberField = MegatronField<double>;
using AnyField = std::variant<SizeField, FlagField, NumberField>;
using ModelConfig = models::TransformerConfig;

// Calls visit(field) with the MegatronField of each row.
template <typename Visit>
void each_field(std::span<const AnyField> fields, Visit visit) {
  for (const auto& field : fields) std::visit(visit, field);
}

inline constexpr auto kModelFields = std::to_array<AnyField>({
    SizeField{"num_layers", &ModelConfig::num_layers, {}, kMaxLayers},
    SizeField{"hidden_size", &ModelConfig::hidden_size},
    SizeField{"ffn_hidden_size", &ModelConfig::ffn_hidden_size},
    SizeField{"num_attention_heads", &ModelConfig::num_attention_heads, {}, kMaxHeads},
});
inline constexpr auto kBiasFields = std::to_array<AnyField>({
    FlagField{"add_bias_linear", &ModelConfig::add_bias_linear, true},
    FlagField{"add_qkv_bias", &ModelConfig::add_qkv_bias, false},
});
inline constexpr auto kHeadFields = std::to_array<AnyField>({
    FlagField{"untie_embeddings_and_output_weights",
              &ModelConfig::untie_embeddings_and_output_weights, false},
    FlagField{"apply_layernorm_1p", &ModelConfig::layernorm_zero_centered_gamma, false},
});
inline constexpr auto kRotaryFields = std::to_array<AnyField>({
    NumberField{"rotary_percent", &ModelConfig::rotary_percent, 1.0},
    FlagField{.argument = "rotary_interleaved",
              .member = &ModelConfig::rotary_interleaved,
              .otherwise = false,
              .compared = Compared::kNever},  // latent attention's own order says it otherwise
});
inline constexpr auto kLatentFields = std::to_array<AnyField>({
    SizeField{.argument = "q_lora_rank",
              .member = &ModelConfig::q_lora_rank,
              .otherwise = 0,
              .none_if_zero = true},
    SizeField{"kv_lora_rank", &ModelConfig::kv_lora_rank},
    SizeField{"qk_head_dim", &ModelConfig::qk_head_dim},
    SizeField{"qk_pos_emb_head_dim", &ModelConfig::qk_pos_emb_head_dim},
    SizeField{"v_head_dim", &ModelConfig::v_head_dim},
});
inline constexpr auto kIndexerFields = std::to_array<AnyField>({
    SizeField{"dsa_indexer_n_heads", &ModelConfig::dsa_indexer_n_heads, {}, kMaxHeads},
    SizeField{"dsa_indexer_head_dim", &ModelConfig::dsa_indexer_head_dim},
    SizeField{"dsa_indexer_topk", &ModelConfig::dsa_indexer_topk},
    SizeField{"dsa_indexer_topk_freq", &ModelConfig::dsa_indexer_topk_freq, 1},
    SizeField{"dsa_indexer_skip_topk_offset", &ModelConfig::dsa_indexer_skip_topk_offset, 0},
});
inline constexpr auto kLinearAttentionFields = std::to_array<AnyField>({
    SizeField{"linear_conv_kernel_dim", &ModelConfig::linear_conv_kernel_dim},
    SizeField{"linear_key_head_dim", &ModelConfig::linear_key_head_dim},
    SizeField{"linear_value_head_dim", &ModelConfig::linear_value_head_dim},
    SizeField{"linear_num_key_heads", &ModelConfig::linear_num_key_heads, {}, kMaxHeads},
    SizeField{"linear_num_value_heads", &ModelConfig::linear_num_value_heads, {}, kMaxHeads},
    FlagField{"attention_output_gate", &ModelConfig::attention_output_gate, false},
});
inline constexpr auto kMambaFields = std::to_array<AnyField>({
    SizeField{"mamba_num_heads", &ModelConfig::mamba_num_heads, {}, kMaxHeads},
    SizeField{"mamba_head_dim", &ModelConfig::mamba_head_dim},
    SizeField{"mamba_num_groups", &ModelConfig::mamba_num_groups, {}, kMaxHeads},
    SizeField{"mamba_state_dim", &ModelConfig::mamba_state_dim},
    SizeField{.argument = "moe_latent_size",
              .member = &ModelConfig::moe_latent_size,
              .otherwise = 0,
              .none_if_zero = true},
});
inline constexpr auto kRouterFields = std::to_array<AnyField>({
    FlagField{.argument = "moe_router_pre_softmax",
              .member = &ModelConfig::moe_router_pre_softmax,
              .otherwise = false,
              .compared = Compared::kNever},  // a sigmoid's router says either
    FlagField{.argument = "moe_router_enable_expert_bias",
              .member = &ModelConfig::moe_router_enable_expert_bias,
              .otherwise = false,
              .compared = Compared::kIfSet},
    NumberField{.argument = "moe_router_topk_scaling_factor",
                .member = &ModelConfig::moe_router_topk_scaling_factor,
                .otherwise = 1.0,
                .compared = Compared::kIfSet},
    SizeField{.argument = "moe_router_num_groups",
              .member = &ModelConfig::moe_router_num_groups,
              .otherwise = 0,
              .none_if_zero = true,
              .compared = Compared::kIfSet},
    SizeField{.argument = "moe_router_group_topk",
              .member = &ModelConfig::moe_router_group_topk,
              .otherwise = 0,
              .none_if_zero = true,
              .compared = Compared::kIfSet},
    SizeField{.argument = "moe_shared_expert_intermediate_size",
              .member = &ModelConfig::moe_shared_expert_intermediate_size,
              .otherwise = 0,
              .none_if_zero = true},
    FlagField{.argument = "moe_shared_expert_gate",
              .member = &ModelConfig::moe_shared_expert_gate,
              .otherwise = false,
              .compared = Compared::kIfSet},
});

}  // namespace ferry::converter
