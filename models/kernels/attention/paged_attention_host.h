// Attention of decoded rows in bf16 on the host, out of the blocks of a cache: the bits that
// attention() in attention.h gives each row, without a copy of its keys and values. All sequences
// share one softmax. As host_product.h, it is held to LibTorch's kernels once for each shape, on
// sums whose terms cancel.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/attention/paged_attention.h"

namespace ferry::models {

// Takes what paged_attention_cuda() does, of any number of channels and block size; -> undefined
// where there is no such kernel.
at::Tensor paged_attention_host(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options);

}  // namespace ferry::models
