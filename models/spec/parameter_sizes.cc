#include "models/spec/parameter_table.h"

namespace ferry::models {
namespace {

std::int64_t size_of_tower(Extent extent, const VisionConfig& vision) {
  switch (extent) {
    case Extent::kVisionHidden:
      return vision.hidden_size;
    case Extent::kVisionQkv:
      return 3 * vision.hidden_size;
    case Extent::kVisionFfn:
      return vision.intermediate_size;
    case Extent::kVisionChannels:
      return vision.in_channels;
    case Extent::kVisionFrames:
      return vision.temporal_patch_size;
    case Extent::kVisionPatch:
      return vision.patch_size;
    case Extent::kVisionGrid:
      return vision.num_position_embeddings;
    case Extent::kVisionMerged:
      return vision.merged_size();
    case Extent::kVisionOut:
      return vision.out_hidden_size;
    default:
      return 0;
  }
}

}  // namespace

std::int64_t size_of(Extent extent, const TransformerConfig& config) {
  const auto heads = config.num_attention_heads;
  switch (extent) {
    case Extent::kNone:
      return 0;
    case Extent::kHidden:
      return config.hidden_size;
    case Extent::kTwiceHidden:
      return 2 * config.hidden_size;
    case Extent::kFfn:
      return config.ffn_hidden_size;
    case Extent::kMoeFfn:
      return config.moe_ffn_hidden_size;
    case Extent::kSharedFfn:
      return config.moe_shared_expert_intermediate_size;
    case Extent::kExperts:
      return config.num_moe_experts;
    case Extent::kOne:
      return 1;
    case Extent::kHeads:
      return heads * config.kv_channels;
    case Extent::kSinks:
      return heads;
    case Extent::kGroups:
      return config.num_query_groups * config.kv_channels;
    case Extent::kChannels:
      return config.kv_channels;
    case Extent::kKeyChannels:
      return config.num_query_groups * config.kv_channels;
    case Extent::kVocab:
      return config.vocab_size;
    case Extent::kLabels:
      return config.num_labels;
    case Extent::kQLora:
      return config.q_lora_rank;
    case Extent::kKvLora:
      return config.kv_lora_rank;
    case Extent::kKvLoraAndRope:
      return config.kv_lora_rank + config.qk_pos_emb_head_dim;
    case Extent::kQHeads:
      return heads * (config.qk_head_dim + config.qk_pos_emb_head_dim);
    case Extent::kKvHeads:
      return heads * (config.qk_head_dim + config.v_head_dim);
    case Extent::kVHeads:
      return heads * config.v_head_dim;
    case Extent::kIndexHeads:
      return config.dsa_indexer_n_heads;
    case Extent::kIndexChannels:
      return config.dsa_indexer_head_dim;
    case Extent::kIndexQueries:
      return config.dsa_indexer_n_heads * config.dsa_indexer_head_dim;
    case Extent::kLinearKeys:
      return config.linear_num_key_heads * config.linear_key_head_dim;
    case Extent::kLinearValues:
      return config.linear_num_value_heads * config.linear_value_head_dim;
    case Extent::kLinearKeyHeads:
      return config.linear_num_key_heads;
    case Extent::kLinearHeads:
      return config.linear_num_value_heads;
    case Extent::kLinearChannels:
      return config.linear_value_head_dim;
    case Extent::kLinearKernel:
      return config.linear_conv_kernel_dim;
    case Extent::kMambaInner:
      return config.mamba_num_heads * config.mamba_head_dim;
    case Extent::kMambaStates:
      return config.mamba_num_groups * config.mamba_state_dim;
    case Extent::kMambaHeads:
      return config.mamba_num_heads;
    case Extent::kMoeLatent:
      return config.moe_latent_size;
    case Extent::kMoeHidden:
      return config.moe_latent_size > 0 ? config.moe_latent_size : config.hidden_size;
    case Extent::kPerLayer:
      return config.per_layer_embed_dim;
    case Extent::kAllLayers:
      return config.num_layers * config.per_layer_embed_dim;
    case Extent::kPerLayerVocab:
      return config.per_layer_embed_vocab_size;
    case Extent::kVisionHidden:
    case Extent::kVisionQkv:
    case Extent::kVisionFfn:
    case Extent::kVisionChannels:
    case Extent::kVisionFrames:
    case Extent::kVisionPatch:
    case Extent::kVisionGrid:
    case Extent::kVisionMerged:
    case Extent::kVisionOut:
      return config.vision ? size_of_tower(extent, *config.vision) : 0;
  }
  return 0;
}

bool applies(When when, const TransformerConfig& config) {
  const bool language_model = config.head == Head::kLanguageModel;
  switch (when) {
    case When::kAlways:
      return true;
    case When::kQkvBias:
      return config.has_qkv_bias();
    case When::kRouter:
      return !config.traits.moe_router_parameter_in_fp32;
    case When::kFp32Router:
      return config.traits.moe_router_parameter_in_fp32;
    case When::kLinearBias:
      return config.add_bias_linear;
    case When::kQkNorm:
      return config.qk_layernorm && !config.qk_layernorm_full;
    case When::kQkNormFull:
      return config.qk_layernorm_full;
    case When::kUntied:
      return language_model && config.untie_embeddings_and_output_weights;
    case When::kScore:
      return !language_model;
    case When::kScoreBias:
      return config.head == Head::kTokenClassification;
    case When::kShared:
      return config.moe_shared_expert_intermediate_size > 0;
    case When::kSharedGate:
      return config.moe_shared_expert_gate;
    case When::kExpertBias:
      return config.moe_router_enable_expert_bias;
    case When::kSinks:
      return config.softmax_offset;
    case When::kQLora:
      return config.q_lora_rank > 0;
    case When::kQLoraNorm:
      return config.q_lora_rank > 0 && !config.is_sparse();
    case When::kNoQLora:
      return config.q_lora_rank == 0;
    case When::kDense:
      return !config.is_sparse();
    case When::kSparse:
      return config.is_sparse();
    case When::kIndexer:
      return config.is_sparse() && !config.takes_over_keys;
    case When::kLayerNorms:
      return config.post_norm == PostNorm::kOfLayer;
    case When::kLinearNorms:
      return config.post_norm == PostNorm::kOfLinear;
    case When::kFusedNorms:
      return !config.has_local_norms();
    case When::kLocalNorms:
      return config.has_local_norms();
    case When::kOwnKeys:
      return config.key_values != KeyValues::kShared;
    case When::kOwnValues:
      return config.key_values == KeyValues::kProjected;
    case When::kKeyValues:
      return config.key_values == KeyValues::kKeys;
    case When::kSharedValues:
      return config.key_values == KeyValues::kShared;
    case When::kPerLayerInputs:
      return config.per_layer_embed_dim > 0;
    case When::kBranches:
      return config.has_global_attention() && config.num_moe_experts > 0;
    case When::kLatentExperts:
      return config.moe_latent_size > 0;
    case When::kHybrid:
      return config.is_hybrid_model();
    case When::kNotHybrid:
      return !config.is_hybrid_model();
  }
  return false;
}

std::vector<std::int64_t> merged_rows(const ParameterRow& row, const TransformerConfig& config) {
  const auto rows = size_of(row.rows, config);
  switch (row.merge) {
    case Merge::kCopy:
      return {rows};
    case Merge::kQkvGroups:
      return {(config.attention_output_gate ? 2 : 1) * size_of(Extent::kHeads, config), rows, rows};
    case Merge::kGateUp:
      if (!config.gated_linear_unit) return {rows};
      return {rows, rows};
  }
  return {};
}

std::int64_t columns_of(const ParameterRow& row, const TransformerConfig& config) {
  return size_of(row.columns, config);
}

}  // namespace ferry::models
