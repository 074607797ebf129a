// The model that a checkpoint describes, in Megatron's field names: plain data, from which
// converters and models are built.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/dtype.h"
#include "models/spec/model_settings.h"
#include "models/spec/vision_config.h"

namespace ferry::models {

// RoPE scaling, in the names of transformers' rope_parameters.
struct RopeScaling {
  RopeType type = RopeType::kDefault;
  double factor = 1.0;
  std::optional<double> low_freq_factor{};
  std::optional<double> high_freq_factor{};
  std::optional<double> attention_factor{};
  std::optional<double> beta_fast{};
  std::optional<double> beta_slow{};
  std::optional<double> mscale{};
  std::optional<double> mscale_all_dim{};
  std::optional<std::int64_t> original_max_position_embeddings{};
  std::optional<bool> truncate{};  // of kYarn: the range of corrected channels is rounded
  // Divisors of the frequencies, one for each, of kLongrope: in sequences of up to
  // original_max_position_embeddings tokens, and in longer ones.
  std::vector<double> short_factor{};
  std::vector<double> long_factor{};
  // Queries are multiplied by 1 + beta * log(1 + floor(position /
  // original_max_position_embeddings)).
  std::optional<double> llama_4_scaling_beta{};

  bool operator==(const RopeScaling&) const = default;
};

// The last layer of the model.
enum class Head : std::uint8_t {
  kLanguageModel,           // logits over the vocabulary
  kSequenceClassification,  // num_labels scores, without bias: reward models
  kTokenClassification,     // num_labels scores of each token, with bias: critics
};

// A norm of what attention and feed-forward give, before it joins the stream between layers.
enum class PostNorm : std::uint8_t {
  kNone,
  kOfLayer,   // GLM-4: post_self_attn_layernorm, post_mlp_layernorm of the layer
  kOfLinear,  // Gemma: post_layernorm of linear_proj and linear_fc2
};

// When a norm rounds to the dtype of its input: before it multiplies by the weight, and behind that
// again, or behind it alone; the last multiplies by 1 + weight.
enum class NormRounding : std::uint8_t { kBeforeWeight, kOnce, kOnceByOnePlus };

// The keys and values of a layer's attention.
enum class KeyValues : std::uint8_t {
  kProjected,  // each by a projection of its own
  kKeys,       // the projection of the keys gives the values, too
  kShared,     // those of a layer before it
};

// Tokens of a chunk of the gated delta rule (chunk_size of transformers).
inline constexpr std::int64_t kDeltaChunk = 64;

// The ways in which all models of a family compute and that neither config.json nor Megatron's
// arguments name: transformers' class has them. The family's file in converter/families/ says them.
struct FamilyTraits {
  // Heads turn in fp32, and are rounded once.
  bool rotary_in_fp32 = false;
  // Layers that look at the sliding window alone turn without scaling.
  bool windows_turn_unscaled = false;
  // Norms multiply by their weight in fp32, and are rounded once.
  bool norms_round_once = false;
  // A router's logits are of the model's dtype, where those of others are of fp32
  // (routes_in_fp32()).
  bool moe_router_logits_in_params_dtype = false;
  // The weights of a token's experts stay in fp32, where others round them to the model's dtype.
  bool moe_router_weights_in_fp32 = false;
  // A router's weight is a parameter of fp32, whatever the model's dtype.
  bool moe_router_parameter_in_fp32 = false;
  // The part of the models that no module computes: "sparse attention". Empty: there is none.
  std::string_view not_computed{};

  bool operator==(const FamilyTraits&) const = default;
};

struct TransformerConfig {
  std::string family{};  // model_type of Hugging Face: "llama"; empty if it is not known
  FamilyTraits traits{};
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
  // The base, without scaling, of layers that look at the sliding window alone, if another one.
  std::optional<double> rotary_base_local{};
  // Per layer, where not all turn with the position: does it not.
  std::vector<bool> no_rope_freq{};
  double rotary_percent = 1.0;  // of a head's channels, the first of which turn
  bool rotary_interleaved =
      false;  // a channel turns with its neighbour, not with one half a head on
  RopeScaling rope_scaling{};
  // Frequencies of a token's positions in time, height and width, which take turns
  // (mrope_interleaved); empty: a token has one position.
  std::vector<std::int64_t> mrope_section{};
  std::optional<std::int64_t> sliding_window{};
  // Per layer, where they differ: does it look at the sliding window alone.
  std::vector<bool> window_attn_skip_freq{};
  // Gemma 4: layers that look at all tokens have heads of this size and query groups of their own,
  // of which global_rotary_percent turns. 0: all layers are alike.
  std::int64_t global_kv_channels = 0;
  std::int64_t num_global_query_groups = 0;
  double global_rotary_percent = 1.0;
  bool attention_k_eq_v = false;  // in those layers, keys are values
  // The last layers, which attend to keys and values of layers before them, and whether their
  // feed-forward is twice as wide.
  std::int64_t num_kv_shared_layers = 0;
  bool use_double_wide_mlp = false;
  KeyValues key_values = KeyValues::kProjected;  // of one layer (of_layer)
  // A second embedding, which has this many channels for each layer; 0: none.
  std::int64_t per_layer_embed_dim = 0;
  std::int64_t per_layer_embed_vocab_size = 0;
  // The factor of products of queries and keys, where it is not that of a head's channels.
  std::optional<double> softmax_scale{};
  bool softmax_offset = false;  // softmax_type "learnable": each head has a sink
  // Activation::kQuickGeglu: quick_gelu(min(gate, c)) * (clamp(up, c) + offset), where c is the
  // clamp value.
  double glu_linear_offset = 0.0;
  std::optional<double> activation_func_clamp_value{};
  bool add_qkv_bias = false;
  bool add_bias_linear =
      false;  // biases of linear_proj, linear_fc1 and linear_fc2; and of linear_qkv
  bool qk_layernorm = false;
  bool qk_layernorm_full = false;  // over the channels of all heads together, not head by head
  PostNorm post_norm = PostNorm::kNone;
  bool pre_norm = true;  // attention and feed-forward read a norm of the stream between layers
  bool layernorm_zero_centered_gamma = false;  // norms multiply by 1 + weight
  Activation activation = Activation::kSilu;
  bool embedding_scaling = false;  // embeddings are multiplied by the root of hidden_size
  // Granite: factors of embeddings and of what attention and feed-forward give, and the divisor of
  // logits.
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;
  double logits_scaling = 1.0;
  // c of c * tanh(x / c): of products of queries and keys, of logits.
  std::optional<double> attn_logit_softcapping{};
  std::optional<double> final_logit_softcapping{};
  bool gated_linear_unit = true;  // a gate beside the projection up
  bool untie_embeddings_and_output_weights = true;

  // Mixture of experts; num_moe_experts is 0 for a model without.
  std::int64_t num_moe_experts = 0;
  std::vector<bool> moe_layer_freq{};  // per layer: has it experts. Empty without experts
  std::int64_t moe_ffn_hidden_size = 0;
  std::int64_t moe_shared_expert_intermediate_size = 0;  // of all shared experts together
  bool moe_shared_expert_gate = false;
  std::int64_t moe_latent_size = 0;  // of what experts read and give; 0: hidden_size
  std::int64_t moe_router_topk = 0;
  ScoreFunction moe_router_score_function = ScoreFunction::kSoftmax;
  bool moe_router_pre_softmax = false;
  bool moe_router_enable_expert_bias = false;
  double moe_router_norm_min = 1e-12;      // ERNIE: weights are divided by their sum, if by no less
  std::int64_t moe_router_num_groups = 0;  // 0: the router does not look at groups
  std::int64_t moe_router_group_topk = 0;
  double moe_router_topk_scaling_factor = 1.0;

  // Multi-latent attention.
  bool multi_latent_attention = false;
  std::int64_t q_lora_rank = 0;  // 0: queries are projected at once
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_head_dim = 0;
  std::int64_t qk_pos_emb_head_dim = 0;
  std::int64_t v_head_dim = 0;

  // Sparse attention of DeepSeek-V3.2: an indexer chooses the keys of a query; 0 without.
  std::int64_t dsa_indexer_n_heads = 0;
  std::int64_t dsa_indexer_head_dim = 0;
  std::int64_t dsa_indexer_topk = 0;
  // GLM-5.2: layers without an indexer take over the choice of the layer before. The others are
  // the layers up to this one, counted from 1, and every dsa_indexer_topk_freq-th from it on.
  std::int64_t dsa_indexer_topk_freq = 1;
  std::int64_t dsa_indexer_skip_topk_offset = 0;
  bool takes_over_keys = false;  // of one layer (of_layer)

  // Gated delta net: linear attention in some layers, beside gated attention in the others.
  std::vector<bool> linear_attention_freq{};  // per layer: has it a delta net. Empty without one
  std::int64_t linear_conv_kernel_dim = 0;
  std::int64_t linear_key_head_dim = 0;
  std::int64_t linear_value_head_dim = 0;
  std::int64_t linear_num_key_heads = 0;
  std::int64_t linear_num_value_heads = 0;
  bool attention_output_gate = false;  // linear_qkv projects a gate beside each query

  // Layers of one module each, by Megatron-Core's letters (hybrid_layer_allocation.py): 'M' a
  // Mamba-2 mixer, '*' attention, '-' feed-forward, 'E' experts. Empty: attention and feed-forward
  // in every layer. The second one is of a prediction layer.
  std::string hybrid_layer_pattern{};
  std::string mtp_hybrid_override_pattern{};
  std::int64_t mamba_num_heads = 0;
  std::int64_t mamba_head_dim = 0;
  std::int64_t mamba_num_groups = 0;
  std::int64_t mamba_state_dim = 0;

  std::int64_t mtp_num_layers = 0;  // multi-token prediction

  std::optional<VisionConfig> vision{};  // of a model that also sees, if its tower is computed

  Head head = Head::kLanguageModel;
  std::int64_t num_labels = 0;  // of a classification head

  // Keys that a query of the layer sees at most, its own among them.
  std::optional<std::int64_t> window_of(std::int64_t layer) const {
    const auto i = static_cast<std::size_t>(layer);
    const bool sees_all = i < window_attn_skip_freq.size() && !window_attn_skip_freq[i];
    return sees_all ? std::nullopt : sliding_window;
  }
  bool has_global_attention() const { return global_kv_channels > 0; }
  // Norms before attention and feed-forward are modules of their own, not of the linear layer that
  // follows them (Megatron-Bridge's dense Gemma 4 is of Megatron-Core's local layers).
  bool has_local_norms() const { return has_global_attention() && num_moe_experts == 0; }
  // The configuration with the sizes of one layer, where layers differ in them.
  TransformerConfig of_layer(std::int64_t layer) const {
    auto config = *this;
    if (has_global_attention() && !window_of(layer)) {
      config.kv_channels = global_kv_channels;
      config.num_query_groups = num_global_query_groups;
      if (attention_k_eq_v) config.key_values = KeyValues::kKeys;
    }
    config.takes_over_keys = is_sparse() && !has_indexer(layer);
    if (layer >= num_layers - num_kv_shared_layers) {
      config.key_values = KeyValues::kShared;
      if (use_double_wide_mlp) config.ffn_hidden_size *= 2;
    }
    return config;
  }
  // Queries and keys of the layer turn with the position.
  bool turns(std::int64_t layer) const {
    const auto i = static_cast<std::size_t>(layer);
    return i >= no_rope_freq.size() || !no_rope_freq[i];
  }
  // They do so without scaling, and by rotary_base_local if there is one.
  bool turns_locally(std::int64_t layer) const {
    return has_local_rotary() && window_of(layer).has_value();
  }
  bool has_local_rotary() const { return rotary_base_local || traits.windows_turn_unscaled; }
  NormRounding norm_rounding() const {
    if (layernorm_zero_centered_gamma) return NormRounding::kOnceByOnePlus;
    return traits.norms_round_once ? NormRounding::kOnce : NormRounding::kBeforeWeight;
  }
  bool is_moe_layer(std::int64_t layer) const {
    return num_moe_experts > 0 && moe_layer_freq[static_cast<std::size_t>(layer)];
  }
  bool has_linear_attention() const { return !linear_attention_freq.empty(); }
  bool is_hybrid_model() const { return !hybrid_layer_pattern.empty(); }
  bool is_linear_attention_layer(std::int64_t layer) const {
    const auto i = static_cast<std::size_t>(layer);  // prediction layers come behind the others
    return i < linear_attention_freq.size() && linear_attention_freq[i];
  }
  // Layers whose keys and values generation keeps.
  std::int64_t num_key_value_layers() const {
    return num_layers - std::ranges::count(linear_attention_freq, true);
  }
  // Layers of two kinds have keys of their own in a Megatron checkpoint, layers of one kind are
  // stacked. Megatron-Core stacks none where linear_attention_freq is a list.
  bool is_homogeneous() const {
    return !has_linear_attention() && !is_hybrid_model() && !use_double_wide_mlp &&
           !shares_indexers() &&
           std::ranges::all_of(moe_layer_freq, [&](bool moe) { return moe == moe_layer_freq[0]; });
  }
  // Tensor parallel ranks share out the query groups, or, where they are more, the queries of each
  // group (Megatron-Core transformer_config.py asks for the same).
  bool shares_query_groups(std::int64_t tp) const {
    return num_query_groups % tp == 0 || tp % num_query_groups == 0;
  }
  // Tokens of the longest sequence that is generated: a longer one of kLongrope turns otherwise
  // from its first token on, and so has other keys.
  std::int64_t max_generated_positions() const {
    const auto& original = rope_scaling.original_max_position_embeddings;
    return rope_scaling.type == RopeType::kLongrope && original
               ? std::min(*original, max_position_embeddings)
               : max_position_embeddings;
  }
  // Channels of a head that turn.
  std::int64_t rotary_dim() const {
    return multi_latent_attention
               ? qk_pos_emb_head_dim
               : static_cast<std::int64_t>(static_cast<double>(kv_channels) * rotary_percent);
  }
  // DeepSeek's routers, and those that have taken over their bias, compute in fp32.
  bool routes_in_fp32() const { return multi_latent_attention || moe_router_enable_expert_bias; }
  bool computes_vision() const { return vision && vision->problem.empty(); }
  // A language model whose output layer is its embedding.
  bool is_tied() const {
    return head == Head::kLanguageModel && !untie_embeddings_and_output_weights;
  }
  bool has_qkv_bias() const { return add_qkv_bias || add_bias_linear; }
  bool is_sparse() const { return dsa_indexer_n_heads > 0; }
  bool shares_indexers() const { return is_sparse() && dsa_indexer_topk_freq > 1; }
  // The rule of Megatron-Core's is_dsa_skip_topk_layer (experimental_attention_variant/dsa.py).
  bool has_indexer(std::int64_t layer) const {
    const auto offset = std::max<std::int64_t>(dsa_indexer_skip_topk_offset, 1);
    return is_sparse() &&
           std::max<std::int64_t>(layer + 1 - offset, 0) % dsa_indexer_topk_freq == 0;
  }
  bool operator==(const TransformerConfig&) const = default;
};

}  // namespace ferry::models
