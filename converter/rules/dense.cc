#include "converter/rules/dense.h"

namespace ferry::converter {
namespace {

using enum Merge;
using enum Split;
using E = Extent;
using enum When;

constexpr Rule kFirst[] = {
    {"embedding.word_embeddings.weight", kCopy, kColumn, "model.embed_tokens.weight", E::kVocab, E::kHidden, kAlways},
};

constexpr Rule kLayer[] = {
    {"self_attention.linear_qkv.weight",            kQkvGroups, kColumn, "self_attn.{q,k,v}_proj.weight",   E::kGroups,   E::kHidden, kAlways    },
    {"self_attention.linear_qkv.bias",              kQkvGroups, kColumn, "self_attn.{q,k,v}_proj.bias",     E::kGroups,   E::kNone,   kQkvBias   },
    {"self_attention.linear_proj.weight",           kCopy,      kRow,    "self_attn.o_proj.weight",         E::kHidden,   E::kHeads,  kAlways    },
    {"self_attention.linear_proj.bias",             kCopy,      kNone,   "self_attn.o_proj.bias",           E::kHidden,   E::kNone,   kLinearBias},
    {"self_attention.q_layernorm.weight",           kCopy,      kNone,   "self_attn.q_norm.weight",         E::kChannels, E::kNone,   kQkNorm    },
    {"self_attention.k_layernorm.weight",           kCopy,      kNone,   "self_attn.k_norm.weight",         E::kChannels, E::kNone,   kQkNorm    },
    {"mlp.linear_fc1.weight",                       kGateUp,    kColumn, "mlp.{gate,up}_proj.weight",       E::kFfn,      E::kHidden, kAlways    },
    {"mlp.linear_fc1.bias",                         kGateUp,    kColumn, "mlp.{gate,up}_proj.bias",         E::kFfn,      E::kNone,   kLinearBias},
    {"mlp.linear_fc2.weight",                       kCopy,      kRow,    "mlp.down_proj.weight",            E::kHidden,   E::kFfn,    kAlways    },
    {"mlp.linear_fc2.bias",                         kCopy,      kNone,   "mlp.down_proj.bias",              E::kHidden,   E::kNone,   kLinearBias},
    {"self_attention.linear_qkv.layer_norm_weight", kCopy,      kNone,   "input_layernorm.weight",          E::kHidden,   E::kNone,   kAlways    },
    {"mlp.linear_fc1.layer_norm_weight",            kCopy,      kNone,   "post_attention_layernorm.weight", E::kHidden,   E::kNone,   kAlways    },
};

constexpr Rule kLast[] = {
    {"decoder.final_layernorm.weight", kCopy, kNone,   "model.norm.weight", E::kHidden, E::kNone,   kAlways},
    {"output_layer.weight",            kCopy, kColumn, "lm_head.weight",    E::kVocab,  E::kHidden, kUntied},
};

constexpr ExtraStateRule kLayerExtraStates[] = {
    {"self_attention.linear_qkv",     kAlways},
    {"self_attention.linear_proj",    kAlways},
    {"self_attention.core_attention", kAlways}, // megatron-core up to 0.14 insists on it
    {"self_attention.q_layernorm",    kQkNorm},
    {"self_attention.k_layernorm",    kQkNorm},
    {"mlp.linear_fc1",                kAlways},
    {"mlp.linear_fc2",                kAlways},
};

constexpr ExtraStateRule kLastExtraStates[] = {
    {"decoder.final_layernorm", kAlways},
};

}  // namespace

const RuleTable kDenseRules{
    .hf_layer = "model.layers.{l}.",
    .megatron_layer = "decoder.layers.",
    .first = kFirst,
    .layer = kLayer,
    .last = kLast,
    .layer_extra_states = kLayerExtraStates,
    .last_extra_states = kLastExtraStates,
};

}  // namespace ferry::converter
