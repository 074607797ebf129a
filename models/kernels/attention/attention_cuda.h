// Attention on a GPU, by two kernels. Each gives a row the same bits whatever follows in its
// sequence, whatever is packed beside it and however many rows are computed at a time.
//
// Flash takes all segments in one call. cuDNN's, which Hugging Face's "sdpa" gets on Hopper unless
// another is pinned, takes one segment at a time, but also heads of MLA, whose values are narrower
// than their keys. The two differ from each other: docs/numerics.md says which a family gets in
// kBitwise. In kFast sequences of one length go to cuDNN all at once. Heads with sinks take flash
// in kFast, a kernel of their own in kBitwise (eager_attention_cuda.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "models/kernels/attention/attention.h"

namespace ferry::models {

enum class GpuAttention : std::uint8_t { kFlash, kCudnn };

// kFlash for heads whose values are as wide as their keys.
GpuAttention gpu_attention_of(std::int64_t dim, std::int64_t value_dim);

// Computes attention() of attention.h for bf16 on a GPU. Differentiable.
at::Tensor attention_cuda(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const std::vector<AttentionSegment>& segments,
                          const AttentionOptions& options,
                          GpuAttention kernel);

}  // namespace ferry::models
