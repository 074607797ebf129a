// Attention on a GPU: flash takes all segments in one call, and gives a row the same bits whatever
// follows in its sequence, whatever is packed beside it and however many rows are computed at a
// time. Values that are narrower than their keys (MLA) are padded. In kFast sequences of one length
// go to cuDNN's kernel all at once. Heads with sinks take flash in kFast, a kernel of their own in
// kBitwise (eager_attention_cuda.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/kernels/attention/attention.h"

namespace ferry::models {

// Computes attention() of attention.h for bf16 on a GPU. Differentiable.
at::Tensor attention_cuda(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const std::vector<AttentionSegment>& segments,
                          const AttentionOptions& options);

}  // namespace ferry::models
