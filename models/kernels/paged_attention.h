// Attention of decoded rows, one of each sequence, to keys and values that lie in blocks of a cache
// (Kwon et al. 2023, PagedAttention). A row has the bits that attention() in attention.h gives it.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/attention.h"

namespace ferry::models {

struct PagedKeys {
  at::Tensor key{};           // [blocks, block_size, groups, dim]
  at::Tensor value{};         // [blocks, block_size, groups, value_dim]
  at::Tensor block_tables{};  // [sequences, max_blocks], int32: the blocks of each, in order
  at::Tensor lengths{};       // [sequences], int32: its keys, the row's own among them
};

// Whether paged_attention_cuda() has a kernel for these heads.
bool paged_attention_cuda_supports(const at::Tensor& query,
                                   const PagedKeys& keys,
                                   const AttentionOptions& options);

// query [sequences, heads, dim], one row of each -> [sequences, heads, value_dim]. Reads nothing
// back to the host. Only for inference.
at::Tensor paged_attention_cuda(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options);

}  // namespace ferry::models
