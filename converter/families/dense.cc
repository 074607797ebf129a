#include "converter/families/blocks.h"
#include "converter/families/tables.h"

namespace ferry::converter {

const RuleTable kDenseRules{
    .first = kEmbedding,
    .attention = kGroupedQueryAttention,
    .dense_mlp = kGatedMlp,
    .last = kFinal,
    .attention_also = kGroupedQueryAttentionAlso,
    .dense_also = kGatedMlpAlso,
    .attention_extra_states = kGroupedQueryAttentionStates,
    .dense_mlp_extra_states = kGatedMlpStates,
    .last_extra_states = kFinalStates,
};

}  // namespace ferry::converter
