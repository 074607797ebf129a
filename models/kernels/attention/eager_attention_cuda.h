// Attention with sinks on a GPU in the order of "eager" attention of GPT-OSS in transformers:
// eager_attention.cu describes it, docs/numerics.md says where transformers has the same bits. A
// row depends on that row, its keys and values alone, whether it is decoded, in a chunk or in a
// whole sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/attention/attention_calls.h"
#include "models/kernels/attention/paged_attention.h"

namespace ferry::models {

struct EagerAttentionResult {
  at::Tensor rows{};     // [queries, heads, dim]
  at::Tensor log_sum{};  // [heads, queries], fp32: the log of the sum of exponentials, the sink's
                         // among them
};

// Heads that paged_attention_cuda_supports(); sinks [heads] in bf16. Not differentiable.
EagerAttentionResult eager_attention_cuda(const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const at::Tensor& sinks,
                                          const RowsOfSequences& queries,
                                          const RowsOfSequences& keys,
                                          const AttentionCall& call);

// paged_attention_cuda() with options.sinks in kBitwise.
at::Tensor eager_paged_attention_cuda(const at::Tensor& query,
                                      const PagedKeys& keys,
                                      const AttentionOptions& options);

}  // namespace ferry::models
