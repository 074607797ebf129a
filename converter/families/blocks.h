// Rows that several tables share: what comes before the layers and after them, attention by query
// groups, the gated MLP.
#pragma once

#include "converter/families/rule.h"

namespace ferry::converter {

// The words of the tables.
using enum Merge;
using enum Split;
using enum When;
using E = Extent;

inline constexpr Rule kEmbedding[] = {
    {"embedding.word_embeddings.weight", kCopy, kColumn, "model.embed_tokens.weight", E::kVocab,
     E::kHidden, kAlways},
};

inline constexpr Rule kGroupedQueryAttention[] = {
    {"self_attention.linear_qkv.weight", kQkvGroups, kColumn, "self_attn.{q,k,v}_proj.weight",
     E::kGroups, E::kHidden, kAlways},
    {"self_attention.linear_qkv.bias", kQkvGroups, kColumn, "self_attn.{q,k,v}_proj.bias",
     E::kGroups, E::kNone, kQkvBias},
    {"self_attention.linear_proj.weight", kCopy, kRow, "self_attn.o_proj.weight", E::kHidden,
     E::kHeads, kAlways},
    {"self_attention.linear_proj.bias", kCopy, kNone, "self_attn.o_proj.bias", E::kHidden, E::kNone,
     kLinearBias},
    {"self_attention.q_layernorm.weight", kCopy, kNone, "self_attn.q_norm.weight", E::kChannels,
     E::kNone, kQkNorm},
    {"self_attention.k_layernorm.weight", kCopy, kNone, "self_attn.k_norm.weight", E::kChannels,
     E::kNone, kQkNorm},
    {"self_attention.linear_qkv.layer_norm_weight", kCopy, kNone, "input_layernorm.weight",
     E::kHidden, E::kNone, kAlways},
};

inline constexpr ExtraStateRule kGroupedQueryAttentionStates[] = {
    {"self_attention.linear_qkv", kAlways},     {"self_attention.linear_proj", kAlways},
    {"self_attention.core_attention", kAlways},  // megatron-core up to 0.14 insists on it
    {"self_attention.q_layernorm", kQkNorm},    {"self_attention.k_layernorm", kQkNorm},
};

inline constexpr Rule kGatedMlp[] = {
    {"mlp.linear_fc1.weight", kGateUp, kColumn, "mlp.{gate,up}_proj.weight", E::kFfn, E::kHidden,
     kAlways},
    {"mlp.linear_fc1.bias", kGateUp, kColumn, "mlp.{gate,up}_proj.bias", E::kFfn, E::kNone,
     kLinearBias},
    {"mlp.linear_fc2.weight", kCopy, kRow, "mlp.down_proj.weight", E::kHidden, E::kFfn, kAlways},
    {"mlp.linear_fc2.bias", kCopy, kNone, "mlp.down_proj.bias", E::kHidden, E::kNone, kLinearBias},
    {"mlp.linear_fc1.layer_norm_weight", kCopy, kNone, "post_attention_layernorm.weight",
     E::kHidden, E::kNone, kAlways},
};

inline constexpr ExtraStateRule kGatedMlpStates[] = {
    {"mlp.linear_fc1", kAlways},
    {"mlp.linear_fc2", kAlways},
};

inline constexpr ExtraStateRule kMoeStates[] = {
    {"pre_mlp_layernorm", kAlways},
    {"mlp.experts.experts.linear_fc1", kAlways, true},
    {"mlp.experts.experts.linear_fc2", kAlways, true},
    {"mlp.shared_experts.linear_fc1", kShared},
    {"mlp.shared_experts.linear_fc2", kShared},
};

inline constexpr Rule kFinal[] = {
    {"decoder.final_layernorm.weight", kCopy, kNone, "model.norm.weight", E::kHidden, E::kNone,
     kAlways},
    {"output_layer.weight", kCopy, kColumn, "lm_head.weight", E::kVocab, E::kHidden, kUntied},
    {"output_layer.weight", kCopy, kNone, "score.weight", E::kLabels, E::kHidden, kScore},
    {"output_layer.bias", kCopy, kNone, "score.bias", E::kLabels, E::kNone, kScoreBias},
};

inline constexpr ExtraStateRule kFinalStates[] = {
    {"decoder.final_layernorm", kAlways},
};

// As local layer specifications name the norms in the modules themselves, and so in legacy files.
inline constexpr AlsoRule kGroupedQueryAttentionAlso[] = {
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};

inline constexpr AlsoRule kGatedMlpAlso[] = {
    {"mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"},
};

// Local layer specifications keep the norm before the experts under the name that it has in a
// dense layer.
inline constexpr AlsoRule kMoeAlso[] = {
    {"pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
};

}  // namespace ferry::converter
