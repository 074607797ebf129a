#include "converter/families/blocks.h"
#include "converter/families/tables.h"

namespace ferry::converter {
namespace {

constexpr Rule kLatentAttention[] = {
    {"input_layernorm.weight", kCopy, kNone, "input_layernorm.weight", E::kHidden, E::kNone,
     kAlways},
    {"self_attention.linear_q_proj.weight", kCopy, kColumn, "self_attn.q_proj.weight", E::kQHeads,
     E::kHidden, kNoQLora},
    {"self_attention.linear_q_down_proj.weight", kCopy, kNone, "self_attn.q_a_proj.weight",
     E::kQLora, E::kHidden, kQLora},
    {"self_attention.linear_q_up_proj.layer_norm_weight", kCopy, kNone,
     "self_attn.q_a_layernorm.weight", E::kQLora, E::kNone, kQLora},
    {"self_attention.linear_q_up_proj.weight", kCopy, kColumn, "self_attn.q_b_proj.weight",
     E::kQHeads, E::kQLora, kQLora},
    {"self_attention.linear_kv_down_proj.weight", kCopy, kNone,
     "self_attn.kv_a_proj_with_mqa.weight", E::kKvLoraAndRope, E::kHidden, kAlways},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", kCopy, kNone,
     "self_attn.kv_a_layernorm.weight", E::kKvLora, E::kNone, kAlways},
    {"self_attention.linear_kv_up_proj.weight", kCopy, kColumn, "self_attn.kv_b_proj.weight",
     E::kKvHeads, E::kKvLora, kAlways},
    {"self_attention.linear_proj.weight", kCopy, kRow, "self_attn.o_proj.weight", E::kHidden,
     E::kVHeads, kAlways},
};

constexpr ExtraStateRule kLatentAttentionStates[] = {
    {"input_layernorm", kAlways},
    {"self_attention.linear_q_proj", kNoQLora},
    {"self_attention.linear_q_down_proj", kQLora},
    {"self_attention.linear_q_up_proj", kQLora},
    {"self_attention.linear_kv_down_proj", kAlways},
    {"self_attention.linear_kv_up_proj", kAlways},
    {"self_attention.linear_proj", kAlways},
    {"self_attention.core_attention", kAlways},  // megatron-core up to 0.14 insists on it
};

constexpr Rule kMoe[] = {
    {"pre_mlp_layernorm.weight", kCopy, kNone, "post_attention_layernorm.weight", E::kHidden,
     E::kNone, kAlways},
    {"mlp.router.weight", kCopy, kNone, "mlp.gate.weight", E::kExperts, E::kHidden, kAlways},
    {"mlp.router.expert_bias", kCopy, kNone, "mlp.gate.e_score_correction_bias", E::kExperts,
     E::kNone, kExpertBias, true},
    {"mlp.experts.experts.linear_fc1.weight", kGateUp, kColumn,
     "mlp.experts.{e}.{gate,up}_proj.weight", E::kMoeFfn, E::kHidden, kAlways},
    {"mlp.experts.experts.linear_fc2.weight", kCopy, kRow, "mlp.experts.{e}.down_proj.weight",
     E::kHidden, E::kMoeFfn, kAlways},
    {"mlp.shared_experts.linear_fc1.weight", kGateUp, kColumn,
     "mlp.shared_experts.{gate,up}_proj.weight", E::kSharedFfn, E::kHidden, kShared},
    {"mlp.shared_experts.linear_fc2.weight", kCopy, kRow, "mlp.shared_experts.down_proj.weight",
     E::kHidden, E::kSharedFfn, kShared},
};

constexpr Rule kPrediction[] = {
    {"enorm.weight", kCopy, kNone, "enorm.weight", E::kHidden, E::kNone, kAlways},
    {"hnorm.weight", kCopy, kNone, "hnorm.weight", E::kHidden, E::kNone, kAlways},
    {"eh_proj.weight", kCopy, kColumn, "eh_proj.weight", E::kHidden, E::kTwiceHidden, kAlways},
    {"final_layernorm.weight", kCopy, kNone, "shared_head.norm.weight", E::kHidden, E::kNone,
     kAlways},
};

constexpr ExtraStateRule kPredictionStates[] = {
    {"enorm", kAlways},
    {"hnorm", kAlways},
    {"eh_proj", kAlways},
    {"final_layernorm", kAlways},
};

constexpr CopyRule kPredictionCopies[] = {
    {"embed_tokens.weight", "model.embed_tokens.weight"},
    {"shared_head.head.weight", "lm_head.weight"},
};

constexpr MtpTable kMtp{
    .megatron = "mtp.layers.",
    .transformer_layer = "transformer_layer.",
    .rules = kPrediction,
    .extra_states = kPredictionStates,
    .copies = kPredictionCopies,
};

}  // namespace

const RuleTable kDeepSeekRules{
    .first = kEmbedding,
    .attention = kLatentAttention,
    .dense_mlp = kGatedMlp,
    .moe_mlp = kMoe,
    .last = kFinal,
    .moe_also = kMoeAlso,
    .attention_extra_states = kLatentAttentionStates,
    .dense_mlp_extra_states = kGatedMlpStates,
    .moe_mlp_extra_states = kMoeStates,
    .last_extra_states = kFinalStates,
    .mtp = &kMtp,
};

}  // namespace ferry::converter
