#include "models/spec/parameter_table.h"

namespace ferry::models {
namespace {

using enum Merge;
using enum Split;
using namespace when;  // NOLINT(google-build-using-namespace): names of each row
namespace E = extent;

// Columns: name, merge, split, rows, columns, when, registered, per_expert, fp32, depth,
// keeps_dtype, less_one.
// clang-format off
constexpr ParameterRow kEmbedding[] = {
    {.name = "embedding.word_embeddings.weight", .split = kColumn, .rows = E::kVocab, .columns = E::kHidden, .looked_up = true},
    {.name = "per_layer_embedding.weight", .split = kColumn, .rows = E::kPerLayerVocab, .columns = E::kAllLayers, .when = kPerLayerInputs, .registered = 400, .looked_up = true},
    {"per_layer_model_proj.weight", kCopy, kColumn, E::kAllLayers,     E::kHidden,    kPerLayerInputs, 410},
    {"per_layer_proj_norm.weight",  kCopy, kNone,   E::kPerLayer,      E::kNone,      kPerLayerInputs, 420},
};
// clang-format on
constexpr ExtraStateRow kEmbeddingStates[] = {{"per_layer_model_proj", kPerLayerInputs}};

// clang-format off
constexpr ParameterRow kGroupedQueryAttention[] = {
    {"self_attention.linear_qkv.layer_norm_weight", kCopy,      kNone,   E::kHidden,   E::kNone,   kFusedNorms, 60},
    {"self_attention.linear_qkv.weight",            kQkvGroups, kColumn, E::kGroups,   E::kHidden, kAlways,     70},
    {"self_attention.linear_qkv.bias",              kQkvGroups, kColumn, E::kGroups,   E::kNone,   kQkvBias,    80},
    {"self_attention.q_layernorm.weight",           kCopy,      kNone,   E::kChannels, E::kNone,   kQkNorm,     160},
    {"self_attention.k_layernorm.weight",           kCopy,      kNone,   E::kChannels, E::kNone,   kQkNorm,     170},
    {"self_attention.q_layernorm.weight",           kCopy,      kColumn, E::kHeads,    E::kNone,   kQkNormFull, 160},
    {"self_attention.k_layernorm.weight",           kCopy,      kColumn, E::kKeyChannels, E::kNone, kQkNormFull, 170},
    {"self_attention.linear_proj.weight",           kCopy,      kRow,    E::kHidden,   E::kHeads,  kAlways,     40},
    {"self_attention.linear_proj.bias",             kCopy,      kNone,   E::kHidden,   E::kNone,   kLinearBias, 50},
    {"self_attention.linear_proj.post_layernorm.weight", kCopy, kNone,   E::kHidden,   E::kNone,   kLinearNorms, 55},
    {"post_self_attn_layernorm.weight",             kCopy,      kNone,   E::kHidden,   E::kNone,   kLayerNorms, 175},
    {"self_attention.core_attention.softmax_offset", kCopy,     kColumn, E::kSinks,    E::kNone,   kSinks,      35},
};
// clang-format on
constexpr OtherName kGroupedQueryAttentionOther[] = {
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
    {"post_self_attn_layernorm.weight", "self_attention.post_self_attn_layernorm.weight"},
};
constexpr ExtraStateRow kGroupedQueryAttentionStates[] = {
    {"self_attention.linear_qkv"},
    {"self_attention.linear_proj"},
    {"self_attention.core_attention"},  // megatron-core up to 0.14 insists on it
    {"self_attention.q_layernorm", kQkNorm},
    {"self_attention.k_layernorm", kQkNorm},
    {"self_attention.q_layernorm", kQkNormFull},
    {"self_attention.k_layernorm", kQkNormFull},
    {"self_attention.linear_proj.post_layernorm", kLinearNorms},
    {"post_self_attn_layernorm", kLayerNorms},
};

// clang-format off
constexpr ParameterRow kSlidingAttention[] = {
    {"self_attention_sliding.linear_qkv.layer_norm_weight", kCopy,  kNone,   E::kHidden,   E::kNone,   kFusedNorms, 60},
    {"self_attention_sliding.linear_qkv.weight",       kQkvGroups,  kColumn, E::kGroups,   E::kHidden, kOwnValues,  70},
    {"self_attention_sliding.linear_qkv.weight",       kQkvGroups,  kColumn, E::kGroups,   E::kHidden, kSharedValues, 70},
    {"self_attention_sliding.q_layernorm.weight",           kCopy,  kNone,   E::kChannels, E::kNone,   kAlways,    160},
    {"self_attention_sliding.k_layernorm.weight",           kCopy,  kNone,   E::kChannels, E::kNone,   kOwnKeys,   170},
    {"self_attention_sliding.k_layernorm.weight",           kCopy,  kNone,   E::kChannels, E::kNone,   kSharedValues, 170},
    {"self_attention_sliding.linear_proj.weight",           kCopy,  kRow,    E::kHidden,   E::kHeads,  kAlways,     40},
    {"self_attention_sliding.linear_proj.post_layernorm.weight", kCopy, kNone, E::kHidden, E::kNone,   kLinearNorms, 55},
};
constexpr ParameterRow kGlobalAttention[] = {
    {"self_attention_global.linear_qkv.layer_norm_weight",  kCopy,  kNone,   E::kHidden,   E::kNone,   kFusedNorms, 60},
    {"self_attention_global.linear_qkv.weight",        kQkvGroups,  kColumn, E::kGroups,   E::kHidden, kOwnValues,  70},
    {"self_attention_global.linear_qkv.weight",        kQkvGroups,  kColumn, E::kGroups,   E::kHidden, kKeyValues,  70},
    {"self_attention_global.linear_qkv.weight",        kQkvGroups,  kColumn, E::kGroups,   E::kHidden, kSharedValues, 70},
    {"self_attention_global.q_layernorm.weight",            kCopy,  kNone,   E::kChannels, E::kNone,   kAlways,    160},
    {"self_attention_global.k_layernorm.weight",            kCopy,  kNone,   E::kChannels, E::kNone,   kOwnKeys,   170},
    {"self_attention_global.k_layernorm.weight",            kCopy,  kNone,   E::kChannels, E::kNone,   kSharedValues, 170},
    {"self_attention_global.linear_proj.weight",            kCopy,  kRow,    E::kHidden,   E::kHeads,  kAlways,     40},
    {"self_attention_global.linear_proj.post_layernorm.weight", kCopy, kNone, E::kHidden,  E::kNone,   kLinearNorms, 55},
};
constexpr ParameterRow kScaledLayer[] = {
    {"input_layernorm.weight",           kCopy, kNone, E::kHidden,   E::kNone,     kLocalNorms,      30},
    {"post_self_attn_layernorm.weight",  kCopy, kNone, E::kHidden,   E::kNone,     kLayerNorms,     175},
    {"per_layer_input_gate.weight",      kCopy, kNone, E::kPerLayer, E::kHidden,   kPerLayerInputs, 301},
    {"per_layer_projection.weight",      kCopy, kNone, E::kHidden,   E::kPerLayer, kPerLayerInputs, 302},
    {"post_per_layer_input_norm.weight", kCopy, kNone, E::kHidden,   E::kNone,     kPerLayerInputs, 303},
    {"layer_scalar",                     kCopy, kNone, E::kOne,      E::kNone,     kFusedNorms,     304},
    {"layer_scalar",                     kCopy, kNone, E::kOne,      E::kNone,     kLocalNorms,     304, false, true},
};
// clang-format on
constexpr ExtraStateRow kSlidingAttentionStates[] = {
    {"self_attention_sliding.linear_qkv"},
    {"self_attention_sliding.linear_proj"},
    {"self_attention_sliding.linear_proj.post_layernorm", kLinearNorms},
    {"self_attention_sliding.q_layernorm", kFusedNorms},
    {"self_attention_sliding.k_layernorm", kFusedNorms},
};
constexpr ExtraStateRow kGlobalAttentionStates[] = {
    {"self_attention_global.linear_qkv"},
    {"self_attention_global.linear_proj"},
    {"self_attention_global.linear_proj.post_layernorm", kLinearNorms},
    {"self_attention_global.q_layernorm", kFusedNorms},
    {"self_attention_global.k_layernorm", kFusedNorms},
};

// clang-format off
constexpr ParameterRow kLatentAttention[] = {
    {"input_layernorm.weight",                             kCopy, kNone,   E::kHidden,        E::kNone,   kAlways,  30},
    {"self_attention.linear_q_down_proj.weight",           kCopy, kNone,   E::kQLora,         E::kHidden, kQLora,   100},
    {"self_attention.linear_q_up_proj.layer_norm_weight",  kCopy, kNone,   E::kQLora,         E::kNone,   kQLoraNorm, 110},
    {"self_attention.linear_q_up_proj.weight",             kCopy, kColumn, E::kQHeads,        E::kQLora,  kQLora,   120},
    {"self_attention.linear_q_proj.weight",                kCopy, kColumn, E::kQHeads,        E::kHidden, kNoQLora, 90},
    {"self_attention.linear_kv_down_proj.weight",          kCopy, kNone,   E::kKvLoraAndRope, E::kHidden, kAlways,  130},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", kCopy, kNone,   E::kKvLora,        E::kNone,   kDense,   140},
    {"self_attention.linear_kv_up_proj.weight",            kCopy, kColumn, E::kKvHeads,       E::kKvLora, kAlways,  150},
    {"self_attention.linear_proj.weight",                  kCopy, kRow,    E::kHidden,        E::kVHeads, kAlways,  40},
    {"self_attention.q_layernorm.weight",                  kCopy, kNone,   E::kQLora,         E::kNone,   kSparse,  160},
    {"self_attention.kv_layernorm.weight",                 kCopy, kNone,   E::kKvLora,        E::kNone,   kSparse,  170},
    {"self_attention.core_attention.indexer.linear_wq_b.weight", kCopy, kNone, E::kIndexQueries, E::kQLora, kIndexer, 32},
    {"self_attention.core_attention.indexer.linear_wk.weight", kCopy, kNone, E::kIndexChannels, E::kHidden, kIndexer, 33},
    {"self_attention.core_attention.indexer.k_norm.weight", kCopy, kNone,  E::kIndexChannels, E::kNone,   kIndexer,  34},
    {"self_attention.core_attention.indexer.k_norm.bias",  kCopy, kNone,   E::kIndexChannels, E::kNone,   kIndexer,  35},
    {"self_attention.core_attention.indexer.linear_weights_proj.weight", kCopy, kNone, E::kIndexHeads, E::kHidden, kIndexer, 36},
};
// clang-format on
constexpr OtherName kLatentAttentionOther[] = {
    {"self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"},
};
constexpr ExtraStateRow kLatentAttentionStates[] = {
    {"input_layernorm"},
    {"self_attention.linear_q_proj", kNoQLora},
    {"self_attention.linear_q_down_proj", kQLora},
    {"self_attention.linear_q_up_proj", kQLora},
    {"self_attention.linear_kv_down_proj"},
    {"self_attention.linear_kv_up_proj"},
    {"self_attention.linear_proj"},
    {"self_attention.core_attention"},  // megatron-core up to 0.14 insists on it
    {"self_attention.q_layernorm", kSparse},
    {"self_attention.kv_layernorm", kSparse},
    {"self_attention.core_attention.indexer.linear_wq_b", kIndexer},
    {"self_attention.core_attention.indexer.linear_wk", kIndexer},
    {"self_attention.core_attention.indexer.k_norm", kIndexer},
    {"self_attention.core_attention.indexer.linear_weights_proj", kIndexer},
};

// The parameters in_proj.weight and conv1d.weight have keys for each of their parts.
// clang-format off
constexpr ParameterRow kGatedDeltaNet[] = {
    {"self_attention.in_proj.layer_norm_weight", kCopy, kNone,   E::kHidden,         E::kNone,         kAlways, 60},
    {"self_attention.in_proj.weight.query",      kCopy, kColumn, E::kLinearKeys,     E::kHidden,       kAlways, 70},
    {"self_attention.in_proj.weight.key",        kCopy, kColumn, E::kLinearKeys,     E::kHidden,       kAlways, 71},
    {"self_attention.in_proj.weight.value",      kCopy, kColumn, E::kLinearValues,   E::kHidden,       kAlways, 72},
    {"self_attention.in_proj.weight.z",          kCopy, kColumn, E::kLinearValues,   E::kHidden,       kAlways, 73},
    {"self_attention.in_proj.weight.beta",       kCopy, kColumn, E::kLinearHeads,    E::kHidden,       kAlways, 74},
    {"self_attention.in_proj.weight.alpha",      kCopy, kColumn, E::kLinearHeads,    E::kHidden,       kAlways, 75},
    {"self_attention.conv1d.weight.query",       kCopy, kColumn, E::kLinearKeys,     E::kOne,          kAlways, 100, false, false, E::kLinearKernel},
    {"self_attention.conv1d.weight.key",         kCopy, kColumn, E::kLinearKeys,     E::kOne,          kAlways, 101, false, false, E::kLinearKernel},
    {"self_attention.conv1d.weight.value",       kCopy, kColumn, E::kLinearValues,   E::kOne,          kAlways, 102, false, false, E::kLinearKernel},
    {"self_attention.dt_bias",                   kCopy, kColumn, E::kLinearHeads,    E::kNone,         kAlways, 40,  false, false, E::kNone, true},
    {"self_attention.A_log",                     kCopy, kColumn, E::kLinearHeads,    E::kNone,         kAlways, 50,  false, false, E::kNone, true},
    {"self_attention.out_norm.weight",           kCopy, kNone,   E::kLinearChannels, E::kNone,         kAlways, 160, false, false, E::kNone, false, true},
    {"self_attention.out_proj.weight",           kCopy, kRow,    E::kHidden,         E::kLinearValues, kAlways, 170},
};
// clang-format on
constexpr ExtraStateRow kGatedDeltaNetStates[] = {
    {"self_attention.in_proj"}, {"self_attention.out_norm"}, {"self_attention.out_proj"}};

// The parameters in_proj.weight, conv1d_weight and conv1d_bias have keys for each of their parts.
// clang-format off
constexpr ParameterRow kMamba[] = {
    {"mixer.in_proj.layer_norm_weight", kCopy, kNone,   E::kHidden,      E::kNone,       kAlways, 60},
    {"mixer.in_proj.weight.z",          kCopy, kColumn, E::kMambaInner,  E::kHidden,     kAlways, 70},
    {"mixer.in_proj.weight.x",          kCopy, kColumn, E::kMambaInner,  E::kHidden,     kAlways, 71},
    {"mixer.in_proj.weight.B",          kCopy, kColumn, E::kMambaStates, E::kHidden,     kAlways, 72},
    {"mixer.in_proj.weight.C",          kCopy, kColumn, E::kMambaStates, E::kHidden,     kAlways, 73},
    {"mixer.in_proj.weight.dt",         kCopy, kColumn, E::kMambaHeads,  E::kHidden,     kAlways, 74},
    {"mixer.conv1d.weight.x",           kCopy, kColumn, E::kMambaInner,  E::kOne,        kAlways, 10, false, false, E::kLinearKernel},
    {"mixer.conv1d.weight.B",           kCopy, kColumn, E::kMambaStates, E::kOne,        kAlways, 11, false, false, E::kLinearKernel},
    {"mixer.conv1d.weight.C",           kCopy, kColumn, E::kMambaStates, E::kOne,        kAlways, 12, false, false, E::kLinearKernel},
    {"mixer.conv1d.bias.x",             kCopy, kColumn, E::kMambaInner,  E::kNone,       kAlways, 20},
    {"mixer.conv1d.bias.B",             kCopy, kColumn, E::kMambaStates, E::kNone,       kAlways, 21},
    {"mixer.conv1d.bias.C",             kCopy, kColumn, E::kMambaStates, E::kNone,       kAlways, 22},
    {"mixer.dt_bias",                   kCopy, kColumn, E::kMambaHeads,  E::kNone,       kAlways, 30, false, false, E::kNone, true},
    {"mixer.A_log",                     kCopy, kColumn, E::kMambaHeads,  E::kNone,       kAlways, 40, false, false, E::kNone, true},
    {"mixer.D",                         kCopy, kColumn, E::kMambaHeads,  E::kNone,       kAlways, 50, false, false, E::kNone, true},
    {"mixer.norm.weight",               kCopy, kColumn, E::kMambaInner,  E::kNone,       kAlways, 160},
    {"mixer.out_proj.weight",           kCopy, kRow,    E::kHidden,      E::kMambaInner, kAlways, 170},
};
// clang-format on
constexpr OtherName kMambaOther[] = {{"mixer.in_proj.layer_norm_weight", "norm.weight"}};
constexpr ExtraStateRow kMambaStates[] = {{"mixer.in_proj"}, {"mixer.out_proj"}};

// clang-format off
constexpr ParameterRow kGatedMlp[] = {
    {"mlp.linear_fc1.weight",            kGateUp, kColumn, E::kFfn,    E::kHidden, kAlways,     200},
    {"mlp.linear_fc1.bias",              kGateUp, kColumn, E::kFfn,    E::kNone,   kLinearBias, 210},
    {"mlp.linear_fc2.weight",            kCopy,   kRow,    E::kHidden, E::kFfn,    kAlways,     220},
    {"mlp.linear_fc2.bias",              kCopy,   kNone,   E::kHidden, E::kNone,   kLinearBias, 230},
    {"mlp.linear_fc1.layer_norm_weight", kCopy,   kNone,   E::kHidden, E::kNone,   kFusedNorms, 190},
    {"pre_mlp_layernorm.weight",         kCopy,   kNone,   E::kHidden, E::kNone,   kLocalNorms, 180},
    {"mlp.linear_fc2.post_layernorm.weight", kCopy, kNone, E::kHidden, E::kNone,   kLinearNorms, 235},
    {"post_mlp_layernorm.weight",        kCopy,   kNone,   E::kHidden, E::kNone,   kLayerNorms, 295},
};
// clang-format on
constexpr OtherName kGatedMlpOther[] = {
    {"mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"},
    {"post_mlp_layernorm.weight", "mlp.post_mlp_layernorm.weight"},
};
constexpr ExtraStateRow kGatedMlpStates[] = {
    {"mlp.linear_fc1"},
    {"mlp.linear_fc2"},
    {"mlp.linear_fc2.post_layernorm", kLinearNorms},
    {"post_mlp_layernorm", kLayerNorms},
};

// clang-format off
constexpr ParameterRow kMoe[] = {
    {"pre_mlp_layernorm.weight",              kCopy,   kNone,   E::kHidden,    E::kNone,      kAlways,     180},
    {"mlp.router.weight",                     kCopy,   kNone,   E::kExperts,   E::kHidden,    kRouter,     240},
    {.name = "mlp.router.weight", .rows = E::kExperts, .columns = E::kHidden, .when = kFp32Router, .registered = 240, .keeps_dtype = true, .trained_in_fp32 = true},
    {"mlp.router.bias",                       kCopy,   kNone,   E::kExperts,   E::kNone,      kLinearBias, 245},
    {"mlp.router.expert_bias",                kCopy,   kNone,   E::kExperts,   E::kNone,      kExpertBias, 0,  false, true},
    {"mlp.experts.experts.linear_fc1.weight", kGateUp, kColumn, E::kMoeFfn,    E::kMoeHidden, kAlways,     250, true},
    {"mlp.experts.experts.linear_fc1.bias",   kGateUp, kColumn, E::kMoeFfn,    E::kNone,      kLinearBias, 255, true},
    {"mlp.experts.experts.linear_fc2.weight", kCopy,   kRow,    E::kMoeHidden, E::kMoeFfn,    kAlways,     260, true},
    {"mlp.experts.experts.linear_fc2.bias",   kCopy,   kNone,   E::kHidden,    E::kNone,      kLinearBias, 265, true},
    {"mlp.shared_experts.linear_fc1.weight",  kGateUp, kColumn, E::kSharedFfn, E::kHidden,    kShared,     280},
    {"mlp.shared_experts.linear_fc2.weight",  kCopy,   kRow,    E::kHidden,    E::kSharedFfn, kShared,     290},
    {"mlp.fc1_latent_proj.weight",            kCopy,   kNone,   E::kMoeLatent, E::kHidden,    kLatentExperts, 246},
    {"mlp.fc2_latent_proj.weight",            kCopy,   kNone,   E::kHidden,    E::kMoeLatent, kLatentExperts, 247},
    {"mlp.shared_experts.gate_weight",        kCopy,   kNone,   E::kOne,       E::kHidden,    kSharedGate, 270},
    {"mlp.router.scale",                      kCopy,   kNone,   E::kHidden,    E::kNone,      kBranches,   242},
    {"mlp.router.per_expert_scale",           kCopy,   kNone,   E::kExperts,   E::kNone,      kBranches,   241},
    {"mlp.post_moe_layernorm.weight",         kCopy,   kNone,   E::kHidden,    E::kNone,      kBranches,   292},
    {"mlp.post_shared_expert_layernorm.weight", kCopy, kNone,   E::kHidden,    E::kNone,      kBranches,   293},
    {"pre_shared_expert_layernorm.weight",    kCopy,   kNone,   E::kHidden,    E::kNone,      kBranches,   296},
    {"post_ffn_layernorm.weight",             kCopy,   kNone,   E::kHidden,    E::kNone,      kBranches,   297},
};
// clang-format on
constexpr OtherName kMoeOther[] = {
    {"pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
};
constexpr ExtraStateRow kMoeStates[] = {
    {"pre_mlp_layernorm"},
    {"mlp.experts.experts.linear_fc1", kAlways, true},
    {"mlp.experts.experts.linear_fc2", kAlways, true},
    {"mlp.fc1_latent_proj", kLatentExperts},
    {"mlp.fc2_latent_proj", kLatentExperts},
    {"mlp.shared_experts.linear_fc1", kShared},
    {"mlp.shared_experts.linear_fc2", kShared},
};

// clang-format off
constexpr ParameterRow kPrediction[] = {
    {"enorm.weight",   kCopy, kNone,   E::kHidden, E::kNone,        kAlways, 0},
    {"hnorm.weight",   kCopy, kNone,   E::kHidden, E::kNone,        kAlways, 10},
    {"eh_proj.weight", kCopy, kColumn, E::kHidden, E::kTwiceHidden, kAlways, 20},
};

constexpr ParameterRow kPredictionNorm[] = {
    {"final_layernorm.weight", kCopy, kNone, E::kHidden, E::kNone, kAlways, 300},
};
// clang-format on
constexpr ExtraStateRow kPredictionStates[] = {
    {"enorm"}, {"hnorm"}, {"eh_proj"}, {"final_layernorm"}};

// clang-format off
constexpr ParameterRow kHead[] = {
    {"decoder.final_layernorm.weight", kCopy, kNone,   E::kHidden, E::kNone,   kNotHybrid, 300},
    {"decoder.final_norm.weight",      kCopy, kNone,   E::kHidden, E::kNone,   kHybrid,    300},
    {"output_layer.weight",            kCopy, kColumn, E::kVocab,  E::kHidden, kUntied,    310},
    {"output_layer.weight",            kCopy, kNone,   E::kLabels, E::kHidden, kScore,     310},
    {"output_layer.bias",              kCopy, kNone,   E::kLabels, E::kNone,   kScoreBias, 320},
};
// clang-format on
constexpr ExtraStateRow kHeadStates[] = {{"decoder.final_layernorm", kNotHybrid},
                                         {"decoder.final_norm", kHybrid},
                                         {"output_layer", kHybrid}};  // HybridModel insists on it

// A vision tower, under the names of Megatron-Bridge's Qwen3VLVisionModel. Every rank holds it
// whole. linear_qkv has all queries over all keys over all values, as Hugging Face does.
// clang-format off
constexpr ParameterRow kVisionEmbedding[] = {
    {"patch_embed.proj.weight", kCopy, kNone, E::kVisionHidden, E::kVisionChannels, kAlways, 0, false, false, E::kVisionFrames, false, false, E::kVisionPatch, E::kVisionPatch},
    {"patch_embed.proj.bias",   kCopy, kNone, E::kVisionHidden, E::kNone,           kAlways, 10},
    {.name = "pos_embed.weight", .rows = E::kVisionGrid, .columns = E::kVisionHidden, .registered = 20, .looked_up = true},
};

constexpr ParameterRow kVisionBlock[] = {
    {"self_attention.linear_qkv.layer_norm_weight", kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 60},
    {"self_attention.linear_qkv.layer_norm_bias",   kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 61},
    {"self_attention.linear_qkv.weight",            kCopy, kNone, E::kVisionQkv,    E::kVisionHidden, kAlways, 70},
    {"self_attention.linear_qkv.bias",              kCopy, kNone, E::kVisionQkv,    E::kNone,         kAlways, 80},
    {"self_attention.linear_proj.weight",           kCopy, kNone, E::kVisionHidden, E::kVisionHidden, kAlways, 40},
    {"self_attention.linear_proj.bias",             kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 50},
    {"mlp.linear_fc1.layer_norm_weight",            kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 190},
    {"mlp.linear_fc1.layer_norm_bias",              kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 191},
    {"mlp.linear_fc1.weight",                       kCopy, kNone, E::kVisionFfn,    E::kVisionHidden, kAlways, 200},
    {"mlp.linear_fc1.bias",                         kCopy, kNone, E::kVisionFfn,    E::kNone,         kAlways, 210},
    {"mlp.linear_fc2.weight",                       kCopy, kNone, E::kVisionHidden, E::kVisionFfn,    kAlways, 220},
    {"mlp.linear_fc2.bias",                         kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 230},
};

constexpr ParameterRow kVisionMerger[] = {
    {"patch_norm.weight", kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 0},
    {"patch_norm.bias",   kCopy, kNone, E::kVisionHidden, E::kNone,         kAlways, 10},
    {"linear_fc1.weight", kCopy, kNone, E::kVisionMerged, E::kVisionMerged, kAlways, 20},
    {"linear_fc1.bias",   kCopy, kNone, E::kVisionMerged, E::kNone,         kAlways, 30},
    {"linear_fc2.weight", kCopy, kNone, E::kVisionOut,    E::kVisionMerged, kAlways, 40},
    {"linear_fc2.bias",   kCopy, kNone, E::kVisionOut,    E::kNone,         kAlways, 50},
};

constexpr ParameterRow kVisionDeepstack[] = {
    {"patch_norm.weight", kCopy, kNone, E::kVisionMerged, E::kNone,         kAlways, 0},
    {"patch_norm.bias",   kCopy, kNone, E::kVisionMerged, E::kNone,         kAlways, 10},
    {"linear_fc1.weight", kCopy, kNone, E::kVisionMerged, E::kVisionMerged, kAlways, 20},
    {"linear_fc1.bias",   kCopy, kNone, E::kVisionMerged, E::kNone,         kAlways, 30},
    {"linear_fc2.weight", kCopy, kNone, E::kVisionOut,    E::kVisionMerged, kAlways, 40},
    {"linear_fc2.bias",   kCopy, kNone, E::kVisionOut,    E::kNone,         kAlways, 50},
};
// clang-format on

}  // namespace

const ParameterSection kEmbeddingSection{.rows = kEmbedding, .extra_states = kEmbeddingStates};
const ParameterSection kGroupedQueryAttentionSection{.rows = kGroupedQueryAttention,
                                                     .other_names = kGroupedQueryAttentionOther,
                                                     .extra_states = kGroupedQueryAttentionStates};
const ParameterSection kSlidingAttentionSection{.rows = kSlidingAttention,
                                                .extra_states = kSlidingAttentionStates};
const ParameterSection kGlobalAttentionSection{.rows = kGlobalAttention,
                                               .extra_states = kGlobalAttentionStates};
const ParameterSection kScaledLayerSection{.rows = kScaledLayer};
const ParameterSection kLatentAttentionSection{.rows = kLatentAttention,
                                               .other_names = kLatentAttentionOther,
                                               .extra_states = kLatentAttentionStates};
const ParameterSection kGatedDeltaNetSection{.rows = kGatedDeltaNet,
                                             .extra_states = kGatedDeltaNetStates};
const ParameterSection kMambaSection{
    .rows = kMamba, .other_names = kMambaOther, .extra_states = kMambaStates};
const ParameterSection kGatedMlpSection{
    .rows = kGatedMlp, .other_names = kGatedMlpOther, .extra_states = kGatedMlpStates};
const ParameterSection kMoeSection{
    .rows = kMoe, .other_names = kMoeOther, .extra_states = kMoeStates};
const ParameterSection kPredictionSection{.rows = kPrediction, .extra_states = kPredictionStates};
const ParameterSection kPredictionNormSection{.rows = kPredictionNorm};
const ParameterSection kHeadSection{.rows = kHead, .extra_states = kHeadStates};
const ParameterSection kVisionEmbeddingSection{.rows = kVisionEmbedding};
const ParameterSection kVisionBlockSection{.rows = kVisionBlock};
const ParameterSection kVisionMergerSection{.rows = kVisionMerger};
const ParameterSection kVisionDeepstackSection{.rows = kVisionDeepstack};

Role ParameterRow::role() const {
  if (columns == extent::kNone) return Role::kVector;
  if (depth != extent::kNone) return Role::kConvolution;
  return looked_up ? Role::kTable : Role::kProduct;
}

const ParameterSection& attention_section(const TransformerConfig& config, bool linear) {
  if (linear) return kGatedDeltaNetSection;
  return config.multi_latent_attention ? kLatentAttentionSection : kGroupedQueryAttentionSection;
}

const ParameterSection& mlp_section(bool moe) {
  return moe ? kMoeSection : kGatedMlpSection;
}

const ParameterSection& hybrid_section(const TransformerConfig& config, char letter) {
  if (letter == 'M') return kMambaSection;
  return letter == '*' ? attention_section(config, false) : mlp_section(letter == 'E');
}

}  // namespace ferry::models
