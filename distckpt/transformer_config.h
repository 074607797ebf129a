// The model that a checkpoint describes, in Megatron's field names: plain data, from which
// converters and models are built.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distckpt/dtype.h"

namespace ferry::distckpt {

// RoPE scaling, in the names of transformers' rope_parameters. Empty type: none.
struct RopeScaling {
  std::string type{};  // "llama3", "linear", "dynamic", "yarn"
  double factor = 1.0;
  std::optional<double> low_freq_factor{};
  std::optional<double> high_freq_factor{};
  std::optional<double> attention_factor{};
  std::optional<double> beta_fast{};
  std::optional<double> beta_slow{};
  std::optional<std::int64_t> original_max_position_embeddings{};

  bool operator==(const RopeScaling&) const = default;
};

struct TransformerConfig {
  std::string family{};  // model_type of Hugging Face: "llama"; empty if it is not known
  std::int64_t num_layers = 0;
  std::int64_t hidden_size = 0;
  std::int64_t ffn_hidden_size = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_query_groups = 0;
  std::int64_t kv_channels = 0;  // of one head
  std::int64_t vocab_size = 0;   // without padding; 0 if it is not known
  std::int64_t max_position_embeddings = 0;
  double layernorm_epsilon = 1e-5;
  double rotary_base = 10000.0;
  RopeScaling rope_scaling{};
  std::optional<std::int64_t> sliding_window{};
  bool add_qkv_bias = false;
  bool add_bias_linear =
      false;  // biases of linear_proj, linear_fc1 and linear_fc2; and of linear_qkv
  bool qk_layernorm = false;
  bool untie_embeddings_and_output_weights = true;

  bool has_qkv_bias() const { return add_qkv_bias || add_bias_linear; }
  bool operator==(const TransformerConfig&) const = default;
};

}  // namespace ferry::distckpt
