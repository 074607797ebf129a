// A model for counts that are worked out by hand: every number of it is another one.
#pragma once

#include "models/spec/transformer_config.h"

namespace ferry::models {

inline const TransformerConfig kSmallDense{.num_layers = 3,
                                           .hidden_size = 10,
                                           .ffn_hidden_size = 7,
                                           .num_attention_heads = 4,
                                           .num_query_groups = 2,
                                           .kv_channels = 5,
                                           .vocab_size = 100};

}  // namespace ferry::models
