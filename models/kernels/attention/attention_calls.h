// Differentiable calls of flash's and cuDNN's attention, with a choice of backward: their own add
// up the queries' gradient in any order, unless flash is asked not to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "models/spec/alignment.h"

namespace ferry::models {

struct AttentionCall {
  double scale = 1.0;
  std::optional<std::int64_t> window{};    // keys that a query sees at most; flash alone
  bool deterministic = true;               // gradients have the same bits at every run
  Alignment alignment = Alignment::kFast;  // of sink_attention()
};

// Attention of packed sequences: query [queries, heads, dim], key and value [keys, groups, dim],
// all bf16 -> [queries, heads, dim]. `begin` holds the first row of each sequence and the end,
// [sequences + 1] int32; `longest` is the length of the longest sequence.
struct RowsOfSequences {
  at::Tensor begin{};
  std::int64_t longest = 0;
};
at::Tensor flash_attention(const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const RowsOfSequences& queries,
                           const RowsOfSequences& keys,
                           const AttentionCall& call);

// The same beside a score of each head, sinks [heads], which has no value. kFast scales flash's
// result; kBitwise is eager_attention_cuda(). The backward is flash's: with the result and the log
// of the sum that include the sink its formula is that of such a softmax (Dao 2023, 3.1.2).
at::Tensor sink_attention(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const at::Tensor& sinks,
                          const RowsOfSequences& queries,
                          const RowsOfSequences& keys,
                          const AttentionCall& call);

// Sequences of one length: query [sequences, heads, length, dim], key [sequences, groups, length,
// dim], value [sequences, groups, length, value_dim] -> [sequences, heads, length, value_dim]. A
// deterministic backward is flash's, with values padded by zeros to the width of keys.
at::Tensor cudnn_attention(const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const AttentionCall& call);

}  // namespace ferry::models
