#include "converter/families/blocks.h"
#include "converter/families/tables.h"

namespace ferry::converter {
namespace {

constexpr Rule kMixtralMoe[] = {
    {"pre_mlp_layernorm.weight", kCopy, kNone, "post_attention_layernorm.weight", E::kHidden,
     E::kNone, kAlways},
    {"mlp.router.weight", kCopy, kNone, "block_sparse_moe.gate.weight", E::kExperts, E::kHidden,
     kAlways},
    {"mlp.experts.experts.linear_fc1.weight", kGateUp, kColumn,
     "block_sparse_moe.experts.{e}.{w1,w3}.weight", E::kMoeFfn, E::kHidden, kAlways},
    {"mlp.experts.experts.linear_fc2.weight", kCopy, kRow, "block_sparse_moe.experts.{e}.w2.weight",
     E::kHidden, E::kMoeFfn, kAlways},
};

constexpr Rule kQwenMoe[] = {
    {"pre_mlp_layernorm.weight", kCopy, kNone, "post_attention_layernorm.weight", E::kHidden,
     E::kNone, kAlways},
    {"mlp.router.weight", kCopy, kNone, "mlp.gate.weight", E::kExperts, E::kHidden, kAlways},
    {"mlp.experts.experts.linear_fc1.weight", kGateUp, kColumn,
     "mlp.experts.{e}.{gate,up}_proj.weight", E::kMoeFfn, E::kHidden, kAlways},
    {"mlp.experts.experts.linear_fc2.weight", kCopy, kRow, "mlp.experts.{e}.down_proj.weight",
     E::kHidden, E::kMoeFfn, kAlways},
    {"mlp.shared_experts.linear_fc1.weight", kGateUp, kColumn,
     "mlp.shared_expert.{gate,up}_proj.weight", E::kSharedFfn, E::kHidden, kShared},
    {"mlp.shared_experts.linear_fc2.weight", kCopy, kRow, "mlp.shared_expert.down_proj.weight",
     E::kHidden, E::kSharedFfn, kShared},
    {"mlp.shared_experts.gate_weight", kCopy, kNone, "mlp.shared_expert_gate.weight", E::kOne,
     E::kHidden, kSharedGate},
};

}  // namespace

const RuleTable kMixtralRules{
    .first = kEmbedding,
    .attention = kGroupedQueryAttention,
    .moe_mlp = kMixtralMoe,
    .last = kFinal,
    .attention_also = kGroupedQueryAttentionAlso,
    .moe_also = kMoeAlso,
    .attention_extra_states = kGroupedQueryAttentionStates,
    .moe_mlp_extra_states = kMoeStates,
    .last_extra_states = kFinalStates,
};

const RuleTable kQwenMoeRules{
    .first = kEmbedding,
    .attention = kGroupedQueryAttention,
    .dense_mlp = kGatedMlp,
    .moe_mlp = kQwenMoe,
    .last = kFinal,
    .attention_also = kGroupedQueryAttentionAlso,
    .dense_also = kGatedMlpAlso,
    .moe_also = kMoeAlso,
    .attention_extra_states = kGroupedQueryAttentionStates,
    .dense_mlp_extra_states = kGatedMlpStates,
    .moe_mlp_extra_states = kMoeStates,
    .last_extra_states = kFinalStates,
};

}  // namespace ferry::converter
