// Attention of decoded rows in bf16 on the host, out of the blocks of a cache: the bits that
// attention() in attention.h gives each row, without a copy of its keys and values. All sequences
// share one softmax. Each shape is compared once with LibTorch's kernels, on sums whose terms
// cancel, as in host_product.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/attention/paged_attention.h"

namespace ferry::models {

// Takes the arguments of paged_attention_cuda(), with any number of channels and any block size.
// Returns an undefined tensor where this machine has no such kernel.
at::Tensor paged_attention_host(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options);

}  // namespace ferry::models
