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
enum class Extent : std::uint8_t {
  kNone,            // there is no such dimension
  kHidden,          // hidden_size
  kTwiceHidden,     // 2 * hidden_size
  kFfn,             // ffn_hidden_size
  kMoeFfn,          // moe_ffn_hidden_size
  kSharedFfn,       // moe_shared_expert_intermediate_size
  kExperts,         // num_moe_experts
  kOne,             // 1
  kHeads,           // num_attention_heads * kv_channels
  kSinks,           // num_attention_heads
  kGroups,          // with kQkvGroups: kHeads for q, twice that with gates, and num_query_groups *
                    // kv_channels for k and v
  kChannels,        // kv_channels
  kKeyChannels,     // num_query_groups * kv_channels
  kVocab,           // vocab_size; padded in Megatron
  kLabels,          // num_labels
  kQLora,           // q_lora_rank
  kKvLora,          // kv_lora_rank
  kKvLoraAndRope,   // kv_lora_rank + qk_pos_emb_head_dim
  kQHeads,          // num_attention_heads * (qk_head_dim + qk_pos_emb_head_dim)
  kKvHeads,         // num_attention_heads * (qk_head_dim + v_head_dim)
  kVHeads,          // num_attention_heads * v_head_dim
  kIndexHeads,      // dsa_indexer_n_heads
  kIndexChannels,   // dsa_indexer_head_dim
  kIndexQueries,    // dsa_indexer_n_heads * dsa_indexer_head_dim
  kLinearKeys,      // of a delta net: linear_num_key_heads * linear_key_head_dim
  kLinearValues,    // linear_num_value_heads * linear_value_head_dim
  kLinearKeyHeads,  // linear_num_key_heads
  kLinearHeads,     // linear_num_value_heads
  kLinearChannels,  // linear_value_head_dim
  kLinearKernel,    // linear_conv_kernel_dim
  kMambaInner,      // mamba_num_heads * mamba_head_dim
  kMambaStates,     // mamba_num_groups * mamba_state_dim
  kMambaHeads,      // mamba_num_heads
  kMoeLatent,       // moe_latent_size
  kMoeHidden,       // of experts: moe_latent_size, or hidden_size where that is 0
  kPerLayer,        // per_layer_embed_dim
  kAllLayers,       // num_layers * per_layer_embed_dim
  kPerLayerVocab,   // per_layer_embed_vocab_size, which is not padded
  kVisionHidden,    // of a vision tower (VisionConfig): hidden_size
  kVisionQkv,       // 3 * hidden_size
  kVisionFfn,       // intermediate_size
  kVisionChannels,  // in_channels
  kVisionFrames,    // temporal_patch_size
  kVisionPatch,     // patch_size
  kVisionGrid,      // num_position_embeddings
  kVisionMerged,    // hidden_size * spatial_merge_size^2
  kVisionOut,       // out_hidden_size
};

std::int64_t size_of(Extent extent, const TransformerConfig& config);  // 0 for kNone

// The models that have a parameter.
enum class When : std::uint8_t {
  kAlways,
  kQkvBias,
  kLinearBias,
  kQkNorm,      // of each head
  kQkNormFull,  // of all heads together
  kUntied,      // a language model whose output layer is not the embedding
  kScore,       // a classification head
  kScoreBias,   // one of tokens
  kShared,      // shared experts
  kSharedGate,  // shared experts that have a gate
  kRouter,      // routers whose weight has the model's dtype
  kFp32Router,  // and those whose weight is of fp32
  kExpertBias,  // routers that have a bias
  kSinks,       // a sink of each head in the softmax of attention
  kQLora,       // queries through a low-rank path
  kQLoraNorm,   // whose norm the projection up holds
  kNoQLora,     // queries at once
  kDense,    // latent attention to all keys: the projection up of keys and values holds their norm
  kSparse,   // to those that an indexer chooses: the norms of the low-rank paths stand alone
  kIndexer,  // by an indexer of the layer's own
  kLayerNorms,      // PostNorm::kOfLayer
  kLinearNorms,     // PostNorm::kOfLinear
  kFusedNorms,      // norms that the linear layer behind them holds (pre_norm)
  kLocalNorms,      // norms that stand alone (has_local_norms)
  kOwnKeys,         // attention that projects keys (KeyValues)
  kOwnValues,       // and values
  kKeyValues,       // attention whose keys are its values
  kSharedValues,    // attention to another layer's keys and values
  kPerLayerInputs,  // an embedding for each layer
  kBranches,        // experts beside a feed-forward, each with norms of its own
  kLatentExperts,   // experts of a smaller width than the layers'
  kHybrid,          // layers of one module each
  kNotHybrid,
};

bool applies(When when, const TransformerConfig& config);

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
  Extent rows = Extent::kHidden;
  Extent columns = Extent::kNone;
  When when = When::kAlways;
  // Its place among the parameters of a layer in the order in which Megatron-Core's modules
  // register them, which is that of an optimizer's buckets: TransformerLayer, (MLA)SelfAttention,
  // MLP, MoELayer, MultiTokenPredictionLayer. A linear layer of Transformer Engine registers its
  // norm first. The numbers leave room between them.
  int registered = 0;
  bool per_expert = false;        // one for each expert; such rows stand beside each other
  bool fp32 = false;              // whatever the model's dtype; kept by the router, not trained
  Extent depth = Extent::kNone;   // the third dimension
  bool keeps_dtype = false;       // where the dtype of the others is changed
  bool less_one = false;          // holds the weight less one, where Hugging Face holds the weight
  Extent height = Extent::kNone;  // the fourth dimension
  Extent width = Extent::kNone;   // the fifth
  bool looked_up = false;         // of Role::kTable
  bool trained_in_fp32 = false;   // whatever the model's dtype

  Role role() const;
};

// The rows of the tensors that a row merges, in their order: q, k and v; gate and up; or all.
std::vector<std::int64_t> merged_rows(const ParameterRow& row, const TransformerConfig& config);
// The second dimension; 0 where there is none.
std::int64_t columns_of(const ParameterRow& row, const TransformerConfig& config);

// Another name that a parameter may have in a checkpoint: local layer specifications name some
// norms after the module that follows them.
struct OtherName {
  std::string_view name;
  std::string_view other;
};

// A module that keeps an `_extra_state` in checkpoints of Transformer Engine models.
struct ExtraStateRow {
  std::string_view module;
  When when = When::kAlways;
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
