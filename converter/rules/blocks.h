// Rows that several tables share: what comes before the layers and after them, attention by query
// groups, the gated MLP.
#pragma once

#include "converter/rules/rule.h"

namespace ferry::converter {

inline constexpr Rule kEmbedding[] = {
    {"embedding.word_embeddings.weight", Merge::kCopy, Split::kColumn, "model.embed_tokens.weight", Extent::kVocab, Extent::kHidden, When::kAlways},
};

inline constexpr Rule kGroupedQueryAttention[] = {
    {"self_attention.linear_qkv.weight",            Merge::kQkvGroups, Split::kColumn, "self_attn.{q,k,v}_proj.weight", Extent::kGroups,   Extent::kHidden, When::kAlways    },
    {"self_attention.linear_qkv.bias",              Merge::kQkvGroups, Split::kColumn, "self_attn.{q,k,v}_proj.bias",   Extent::kGroups,   Extent::kNone,   When::kQkvBias   },
    {"self_attention.linear_proj.weight",           Merge::kCopy,      Split::kRow,    "self_attn.o_proj.weight",       Extent::kHidden,   Extent::kHeads,  When::kAlways    },
    {"self_attention.linear_proj.bias",             Merge::kCopy,      Split::kNone,   "self_attn.o_proj.bias",         Extent::kHidden,   Extent::kNone,   When::kLinearBias},
    {"self_attention.q_layernorm.weight",           Merge::kCopy,      Split::kNone,   "self_attn.q_norm.weight",       Extent::kChannels, Extent::kNone,   When::kQkNorm    },
    {"self_attention.k_layernorm.weight",           Merge::kCopy,      Split::kNone,   "self_attn.k_norm.weight",       Extent::kChannels, Extent::kNone,   When::kQkNorm    },
    {"self_attention.linear_qkv.layer_norm_weight", Merge::kCopy,      Split::kNone,   "input_layernorm.weight",        Extent::kHidden,   Extent::kNone,   When::kAlways    },
};

inline constexpr ExtraStateRule kGroupedQueryAttentionStates[] = {
    {"self_attention.linear_qkv",     When::kAlways},
    {"self_attention.linear_proj",    When::kAlways},
    {"self_attention.core_attention", When::kAlways}, // megatron-core up to 0.14 insists on it
    {"self_attention.q_layernorm",    When::kQkNorm},
    {"self_attention.k_layernorm",    When::kQkNorm},
};

inline constexpr Rule kGatedMlp[] = {
    {"mlp.linear_fc1.weight",            Merge::kGateUp, Split::kColumn, "mlp.{gate,up}_proj.weight",       Extent::kFfn,    Extent::kHidden, When::kAlways    },
    {"mlp.linear_fc1.bias",              Merge::kGateUp, Split::kColumn, "mlp.{gate,up}_proj.bias",         Extent::kFfn,    Extent::kNone,   When::kLinearBias},
    {"mlp.linear_fc2.weight",            Merge::kCopy,   Split::kRow,    "mlp.down_proj.weight",            Extent::kHidden, Extent::kFfn,    When::kAlways    },
    {"mlp.linear_fc2.bias",              Merge::kCopy,   Split::kNone,   "mlp.down_proj.bias",              Extent::kHidden, Extent::kNone,   When::kLinearBias},
    {"mlp.linear_fc1.layer_norm_weight", Merge::kCopy,   Split::kNone,   "post_attention_layernorm.weight", Extent::kHidden, Extent::kNone,   When::kAlways    },
};

inline constexpr ExtraStateRule kGatedMlpStates[] = {
    {"mlp.linear_fc1", When::kAlways},
    {"mlp.linear_fc2", When::kAlways},
};

inline constexpr ExtraStateRule kMoeStates[] = {
    {"pre_mlp_layernorm",              When::kAlways},
    {"mlp.experts.experts.linear_fc1", When::kAlways, true},
    {"mlp.experts.experts.linear_fc2",                                When::kAlways,              true},
    {"mlp.shared_experts.linear_fc1",                            When::kShared                           },
    {"mlp.shared_experts.linear_fc2",When::kShared},
};

inline constexpr Rule kFinal[] = {
    {"decoder.final_layernorm.weight", Merge::kCopy, Split::kNone,   "model.norm.weight", Extent::kHidden, Extent::kNone,   When::kAlways   },
    {"output_layer.weight",            Merge::kCopy, Split::kColumn, "lm_head.weight",    Extent::kVocab,  Extent::kHidden, When::kUntied   },
    {"output_layer.weight",            Merge::kCopy, Split::kNone,   "score.weight",      Extent::kLabels, Extent::kHidden, When::kScore    },
    {"output_layer.bias",              Merge::kCopy, Split::kNone,   "score.bias",        Extent::kLabels, Extent::kNone,   When::kScoreBias},
};

inline constexpr ExtraStateRule kFinalStates[] = {
    {"decoder.final_layernorm", When::kAlways},
};

// Local layer specifications keep the norm before the experts under the name that it has in a
// dense layer.
// As local layer specifications name the norms in the modules themselves, and so in legacy files.
inline constexpr AlsoRule kGroupedQueryAttentionAlso[] = {
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
};

inline constexpr AlsoRule kGatedMlpAlso[] = {
    {"mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"},
};

inline constexpr AlsoRule kMoeAlso[] = {
    {"pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
};

}  // namespace ferry::converter
