// The members of config.json, read with their limits; and what several families say alike.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/config_limits.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// Reads members of one JSON object, which outlives it; an absent or null member is "not given".
// Throws Error(kCorrupt) naming the member that is of another kind or out of its limits.
class ConfigFields {
 public:
  ConfigFields(const nlohmann::json& object, std::string source);

  const nlohmann::json* find(std::string_view key) const;
  bool is_null(std::string_view key) const;  // it is there: transformers' classes take it for false
  // 1 to `limit`; required where nothing is said otherwise.
  std::int64_t size(std::string_view key,
                    std::optional<std::int64_t> otherwise = std::nullopt,
                    std::int64_t limit = kMaxSize) const;
  std::optional<std::int64_t> optional_size(std::string_view key) const;
  // 0 to `limit`.
  std::int64_t count(std::string_view key, std::int64_t otherwise, std::int64_t limit) const;
  std::optional<double> optional_number(std::string_view key) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string text(std::string_view key, std::string_view otherwise) const;
  const nlohmann::json& required(std::string_view key) const;
  const std::string& source() const { return source_; }

 private:
  const nlohmann::json& object_;
  std::string source_;
};

// attention_bias and mlp_bias, which are one setting in Megatron-Core. Throws Error(kLayout) where
// they differ.
void read_linear_biases(const ConfigFields& fields, models::TransformerConfig& config);

// DeepSeek's experts, which others have taken over: n_routed_experts, first_k_dense_replace, groups
// of experts, shared ones.
void read_deepseek_experts(const ConfigFields& fields, models::TransformerConfig& config);

// The layers that the list `key` says are of `kind`; it names one of two kinds for each layer.
// Nothing if there is no such list. Throws Error(kCorrupt | kLayout).
std::optional<std::vector<bool>> layers_of_kind(const ConfigFields& fields,
                                                std::string_view key,
                                                std::string_view kind,
                                                std::string_view other,
                                                std::int64_t num_layers);

// The layers without experts: mlp_layer_types, or else first_k_dense_replace of them.
void read_dense_layers(const ConfigFields& fields, models::TransformerConfig& config);

// n_group, topk_group, routed_scaling_factor.
void read_expert_groups(const ConfigFields& fields, models::TransformerConfig& config);

// Throws Error(kLayout) where norm_topk_prob is false.
void require_normed_weights(const ConfigFields& fields);

// Throws Error(kLayout) where scoring_func is another one: classes of transformers that take the
// sigmoid do not read it.
void require_sigmoid_scores(const ConfigFields& fields);

// Qwen's experts: num_experts, decoder_sparse_step, mlp_only_layers.
void read_qwen_experts(const ConfigFields& fields, models::TransformerConfig& config);

// max_window_layers of Qwen's models where config.json says none.
inline constexpr std::int64_t kMaxWindowLayers = 28;

// The layers that layer_types calls sliding_attention; where it is absent, those for whose number
// `otherwise` is true.
std::vector<bool> sliding_layers(const ConfigFields& fields,
                                 std::int64_t num_layers,
                                 const std::function<bool(std::int64_t layer)>& otherwise);

// A kind of layer in layer_types and in rope_parameters.
inline constexpr std::string_view kLocalAttention = "sliding_attention";

// rope_theta in the rope_parameters of layers with a sliding window, or `otherwise`. Throws
// Error(kLayout) where they scale positions.
double read_local_base(const ConfigFields& fields, double otherwise);

// Leaves the sliding window to these layers; there is no window where that is none of them.
void set_window_layers(const ConfigFields& fields,
                       const std::function<bool(std::int64_t layer)>& otherwise,
                       models::TransformerConfig& config);

// Qwen's files name a window that is only used where they say so.
void read_used_window(const ConfigFields& fields, models::TransformerConfig& config);

// Qwen's window: the layers from max_window_layers on slide where layer_types names none.
void read_qwen_window(const ConfigFields& fields, models::TransformerConfig& config);

// Qwen3-VL's vision_config, image_token_id, and mrope_section of its text_config. Nothing where
// there is no vision_config.
void read_qwen3_vision(const ConfigFields& all, models::TransformerConfig& config);
}  // namespace ferry::converter
