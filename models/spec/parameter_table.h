// The one table of the parameters of a GPT model: Megatron-Core's names, shapes, and how tensor
// parallelism splits them. The converter's families, the models' modules, the state of an
// optimizer and the costs of a run all read it. A row is data; parameters.h applies rows to a
// configuration.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "models/spec/transformer_config.h"

namespace ferry::models {

// The way in which the tensors of a Hugging Face checkpoint lie in the parameter.
enum class Merge : std::uint8_t {
  kCopy,       // one tensor, as it is
  kQkvGroups,  // for each query group: its queries, their gates if they have some, its key, its
               // value
  kGateUp,     // gate over up; up alone where there is no gate
};

// The dimension that tensor parallelism splits.
enum class Split : std::uint8_t {
  kNone,    // every rank has all of it
  kColumn,  // the first dimension (of each half, for kGateUp)
  kRow,     // the second
};

// The size of a dimension; with a merge, of one of the tensors that it merges.
using Extent = std::int64_t (*)(const TransformerConfig&);

// clang-format off
namespace extent {

using Config = const TransformerConfig&;

inline constexpr Extent kNone =            [](Config) { return std::int64_t{0}; };  // there is no such dimension
inline constexpr Extent kHidden =          [](Config c) { return c.hidden_size; };
inline constexpr Extent kTwiceHidden =     [](Config c) { return 2 * c.hidden_size; };
inline constexpr Extent kFfn =             [](Config c) { return c.ffn_hidden_size; };
inline constexpr Extent kMoeFfn =          [](Config c) { return c.moe_ffn_hidden_size; };
inline constexpr Extent kSharedFfn =       [](Config c) { return c.moe_shared_expert_intermediate_size; };
inline constexpr Extent kExperts =         [](Config c) { return c.num_moe_experts; };
inline constexpr Extent kOne =             [](Config) { return std::int64_t{1}; };
inline constexpr Extent kHeads =           [](Config c) { return c.num_attention_heads * c.kv_channels; };
inline constexpr Extent kSinks =           [](Config c) { return c.num_attention_heads; };
inline constexpr Extent kGroups =          [](Config c) { return c.num_query_groups * c.kv_channels; };  // with kQkvGroups, of k and v; q has kHeads, twice that with gates
inline constexpr Extent kChannels =        [](Config c) { return c.kv_channels; };
inline constexpr Extent kKeyChannels =     [](Config c) { return c.num_query_groups * c.kv_channels; };
inline constexpr Extent kVocab =           [](Config c) { return c.vocab_size; };  // padded in Megatron
inline constexpr Extent kLabels =          [](Config c) { return c.num_labels; };
inline constexpr Extent kQLora =           [](Config c) { return c.q_lora_rank; };
inline constexpr Extent kKvLora =          [](Config c) { return c.kv_lora_rank; };
inline constexpr Extent kKvLoraAndRope =   [](Config c) { return c.kv_lora_rank + c.qk_pos_emb_head_dim; };
inline constexpr Extent kQHeads =          [](Config c) { return c.num_attention_heads * (c.qk_head_dim + c.qk_pos_emb_head_dim); };
inline constexpr Extent kKvHeads =         [](Config c) { return c.num_attention_heads * (c.qk_head_dim + c.v_head_dim); };
inline constexpr Extent kVHeads =          [](Config c) { return c.num_attention_heads * c.v_head_dim; };
inline constexpr Extent kIndexHeads =      [](Config c) { return c.dsa_indexer_n_heads; };
inline constexpr Extent kIndexChannels =   [](Config c) { return c.dsa_indexer_head_dim; };
inline constexpr Extent kIndexQueries =    [](Config c) { return c.dsa_indexer_n_heads * c.dsa_indexer_head_dim; };

// Delta nets; Mamba mixers have the kernel, too.
inline constexpr Extent kLinearKeys =      [](Config c) { return c.linear_num_key_heads * c.linear_key_head_dim; };
inline constexpr Extent kLinearValues =    [](Config c) { return c.linear_num_value_heads * c.linear_value_head_dim; };
inline constexpr Extent kLinearKeyHeads =  [](Config c) { return c.linear_num_key_heads; };
inline constexpr Extent kLinearHeads =     [](Config c) { return c.linear_num_value_heads; };
inline constexpr Extent kLinearChannels =  [](Config c) { return c.linear_value_head_dim; };
inline constexpr Extent kLinearKernel =    [](Config c) { return c.linear_conv_kernel_dim; };

inline constexpr Extent kMambaInner =      [](Config c) { return c.mamba_num_heads * c.mamba_head_dim; };
inline constexpr Extent kMambaStates =     [](Config c) { return c.mamba_num_groups * c.mamba_state_dim; };
inline constexpr Extent kMambaHeads =      [](Config c) { return c.mamba_num_heads; };
inline constexpr Extent kMoeLatent =       [](Config c) { return c.moe_latent_size; };
inline constexpr Extent kMoeHidden =       [](Config c) { return c.moe_latent_size > 0 ? c.moe_latent_size : c.hidden_size; };
inline constexpr Extent kPerLayer =        [](Config c) { return c.per_layer_embed_dim; };
inline constexpr Extent kAllLayers =       [](Config c) { return c.num_layers * c.per_layer_embed_dim; };
inline constexpr Extent kPerLayerVocab =   [](Config c) { return c.per_layer_embed_vocab_size; };  // which is not padded

// Vision towers.
inline constexpr Extent kVisionHidden =    [](Config c) { return c.vision ? c.vision->hidden_size : 0; };
inline constexpr Extent kVisionQkv =       [](Config c) { return c.vision ? 3 * c.vision->hidden_size : 0; };
inline constexpr Extent kVisionFfn =       [](Config c) { return c.vision ? c.vision->intermediate_size : 0; };
inline constexpr Extent kVisionChannels =  [](Config c) { return c.vision ? c.vision->in_channels : 0; };
inline constexpr Extent kVisionFrames =    [](Config c) { return c.vision ? c.vision->temporal_patch_size : 0; };
inline constexpr Extent kVisionPatch =     [](Config c) { return c.vision ? c.vision->patch_size : 0; };
inline constexpr Extent kVisionGrid =      [](Config c) { return c.vision ? c.vision->num_position_embeddings : 0; };
inline constexpr Extent kVisionMerged =    [](Config c) { return c.vision ? c.vision->merged_size() : 0; };
inline constexpr Extent kVisionOut =       [](Config c) { return c.vision ? c.vision->out_hidden_size : 0; };

}  // namespace extent
// clang-format on

// True of the models that have a parameter.
using When = bool (*)(const TransformerConfig&);

// clang-format off
namespace when {

using Config = const TransformerConfig&;

inline constexpr When kAlways =         [](Config) { return true; };
inline constexpr When kQkvBias =        [](Config c) { return c.has_qkv_bias(); };
inline constexpr When kLinearBias =     [](Config c) { return c.add_bias_linear; };
inline constexpr When kQkNorm =         [](Config c) { return c.qk_layernorm && !c.qk_layernorm_full; };  // of each head
inline constexpr When kQkNormFull =     [](Config c) { return c.qk_layernorm_full; };  // of all heads together
// The output layer is not the embedding.
inline constexpr When kUntied =         [](Config c) { return c.head == Head::kLanguageModel && c.untie_embeddings_and_output_weights; };
inline constexpr When kScore =          [](Config c) { return c.head != Head::kLanguageModel; };  // a classification head
inline constexpr When kScoreBias =      [](Config c) { return c.head == Head::kTokenClassification; };  // one of tokens
inline constexpr When kShared =         [](Config c) { return c.moe_shared_expert_intermediate_size > 0; };  // shared experts
inline constexpr When kSharedGate =     [](Config c) { return c.moe_shared_expert_gate; };
inline constexpr When kRouter =         [](Config c) { return !c.traits.moe_router_parameter_in_fp32; };  // whose weight has the model's dtype
inline constexpr When kFp32Router =     [](Config c) { return c.traits.moe_router_parameter_in_fp32; };
inline constexpr When kExpertBias =     [](Config c) { return c.moe_router_enable_expert_bias; };
inline constexpr When kSinks =          [](Config c) { return c.softmax_offset; };  // a sink of each head in the softmax of attention
inline constexpr When kQLora =          [](Config c) { return c.q_lora_rank > 0; };  // queries through a low-rank path
inline constexpr When kQLoraNorm =      [](Config c) { return c.q_lora_rank > 0 && !c.is_sparse(); };  // a low-rank path whose norm the projection up holds
inline constexpr When kNoQLora =        [](Config c) { return c.q_lora_rank == 0; };  // queries at once
inline constexpr When kDense =          [](Config c) { return !c.is_sparse(); };  // latent attention to all keys: the projection up of keys and values holds their norm
// Latent attention to keys that an indexer chooses: the norms of the low-rank paths stand alone.
inline constexpr When kSparse =         [](Config c) { return c.is_sparse(); };
inline constexpr When kIndexer =        [](Config c) { return c.is_sparse() && !c.takes_over_keys; };  // by an indexer of the layer's own
inline constexpr When kLayerNorms =     [](Config c) { return c.post_norm == PostNorm::kOfLayer; };
inline constexpr When kLinearNorms =    [](Config c) { return c.post_norm == PostNorm::kOfLinear; };
inline constexpr When kFusedNorms =     [](Config c) { return c.pre_norm && !c.has_local_norms(); };  // norms that the linear layer behind them holds
inline constexpr When kLocalNorms =     [](Config c) { return c.has_local_norms(); };  // norms that stand alone
inline constexpr When kOwnKeys =        [](Config c) { return c.key_values != KeyValues::kShared; };  // attention that projects keys
inline constexpr When kOwnValues =      [](Config c) { return c.key_values == KeyValues::kProjected; };  // and projects values
inline constexpr When kKeyValues =      [](Config c) { return c.key_values == KeyValues::kKeys; };  // attention whose keys are its values
inline constexpr When kSharedValues =   [](Config c) { return c.key_values == KeyValues::kShared; };  // attention to another layer's keys and values
inline constexpr When kPerLayerInputs = [](Config c) { return c.per_layer_embed_dim > 0; };  // an embedding for each layer
// Experts beside a feed-forward, each with norms of its own.
inline constexpr When kBranches =       [](Config c) { return c.has_global_attention() && c.num_moe_experts > 0; };
inline constexpr When kLatentExperts =  [](Config c) { return c.moe_latent_size > 0; };  // experts of a smaller width than the layers'
inline constexpr When kHybrid =         [](Config c) { return c.is_hybrid_model(); };  // layers of one module each
inline constexpr When kNotHybrid =      [](Config c) { return !c.is_hybrid_model(); };

}  // namespace when
// clang-format on

// The part of a parameter in what a model computes.
enum class Role : std::uint8_t {
  kVector,       // a norm's weight, a bias, a scale of channels or heads
  kTable,        // rows are looked up by token or place
  kConvolution,  // along tokens, or over the patches of an image
  kProduct,      // rows [n, k] are multiplied with inputs of k channels
};

struct ParameterRow {
  std::string_view name;  // below the prefix of its layer; whole outside of layers
  Merge merge = Merge::kCopy;
  Split split = Split::kNone;
  Extent rows = extent::kHidden;
  Extent columns = extent::kNone;
  When when = when::kAlways;
  // Its place among the parameters of a layer in the order in which Megatron-Core's modules
  // register them, which is that of an optimizer's buckets: TransformerLayer, (MLA)SelfAttention,
  // MLP, MoELayer, MultiTokenPredictionLayer. A linear layer of Transformer Engine registers its
  // norm first. The numbers leave room between them.
  int registered = 0;
  bool per_expert = false;        // one for each expert; such rows stand beside each other
  bool fp32 = false;              // whatever the model's dtype; kept by the router, not trained
  Extent depth = extent::kNone;   // the third dimension
  bool keeps_dtype = false;       // where the dtype of the others is changed
  bool less_one = false;          // holds the weight less one, where Hugging Face holds the weight
  Extent height = extent::kNone;  // the fourth dimension
  Extent width = extent::kNone;   // the fifth
  bool looked_up = false;         // of Role::kTable
  bool trained_in_fp32 = false;   // whatever the model's dtype

  Role role() const;
};

// The rows of the tensors that a row merges, in their order: q, k and v; gate and up; or all.
std::vector<std::int64_t> merged_rows(const ParameterRow& row, const TransformerConfig& config);

// Another name that a parameter may have in a checkpoint: local layer specifications name some
// norms after the module that follows them.
struct OtherName {
  std::string_view name;
  std::string_view other;
};

// A module that keeps an `_extra_state` in checkpoints of Transformer Engine models.
struct ExtraStateRow {
  std::string_view module;
  When when = when::kAlways;
  bool per_expert = false;
};

// The parameters of a module, in the order in which our modules hold them.
struct ParameterSection {
  std::span<const ParameterRow> rows{};
  std::span<const OtherName> other_names{};
  std::span<const ExtraStateRow> extra_states{};
};

extern const ParameterSection kEmbeddingSection;
extern const ParameterSection kGroupedQueryAttentionSection;
// Attention of two sizes: layers that look at a window, those that look at all tokens, and the
// norms and scalars around either.
extern const ParameterSection kSlidingAttentionSection;
extern const ParameterSection kGlobalAttentionSection;
extern const ParameterSection kScaledLayerSection;
extern const ParameterSection kLatentAttentionSection;
extern const ParameterSection kGatedDeltaNetSection;
extern const ParameterSection kMambaSection;
extern const ParameterSection kGatedMlpSection;
extern const ParameterSection kMoeSection;
extern const ParameterSection kPredictionSection;  // before the layer that a prediction layer wraps
extern const ParameterSection kPredictionNormSection;  // behind it
extern const ParameterSection kHeadSection;            // of the last stage
extern const ParameterSection
    kVisionEmbeddingSection;  // of a vision tower: patches and their places
extern const ParameterSection kVisionBlockSection;
extern const ParameterSection kVisionMergerSection;     // its norm is over each patch
extern const ParameterSection kVisionDeepstackSection;  // over the patches of a token together

const ParameterSection& attention_section(const TransformerConfig& config, bool linear);
const ParameterSection& mlp_section(bool moe);
// The one module of a layer, by its letter in hybrid_layer_pattern.
const ParameterSection& hybrid_section(const TransformerConfig& config, char letter);
// The letters that stand for a module.
inline constexpr std::string_view kHybridLetters = "M*-E";

}  // namespace ferry::models
