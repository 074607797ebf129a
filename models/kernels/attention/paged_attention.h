// Attention of decoded rows, one of each sequence, to keys and values that lie in blocks of a cache
// (Kwon et al. 2023, PagedAttention). In kBitwise a row has the bits that attention() in
// attention.h gives it; in kFast its bits depend on the number of sequences, too.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/kernels/attention/attention.h"

namespace ferry::models {

struct PagedKeys {
  at::Tensor key{};  // [blocks, block_size, groups, dim]
  // [blocks, block_size, groups, value_dim]; of latents a view of the keys' first channels
  at::Tensor value{};
  at::Tensor block_tables{};  // [sequences, max_blocks], int32: the blocks of each, in order
  at::Tensor lengths{};       // [sequences], int32: its keys, the row's own among them
};

// True if paged_attention_cuda() supports such heads in bf16 on a GPU: 64, 128 or 256 channels,
// keys of 192 with values of 128, or latents of 512 channels and 64 rotated ones, whose cache has
// no values (value_dim 0).
bool paged_attention_cuda_supports(at::Device device,
                                   at::ScalarType dtype,
                                   std::int64_t dim,
                                   std::int64_t value_dim);

// query [sequences, heads, dim], one row of each -> [sequences, heads, value_dim]; a sequence of
// length 0 gives zeros. Latents have neither sinks nor windows, and the bits of kFast. Blocks have
// 64 keys, and the last dimension of block_tables is contiguous. Reads nothing back to the host.
// Not differentiable.
at::Tensor paged_attention_cuda(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options);

// Does the same for heads of any size on any device, by products over all sequences at once, each
// padded to the width of the block tables. A row's bits depend on that width: for kFast only.
at::Tensor paged_attention_by_products(const at::Tensor& query,
                                       const PagedKeys& keys,
                                       const AttentionOptions& options);

// Stores key [rows, groups, dim] and value [rows, groups, value_dim], of any strides but that of
// the last dimension, in the caches [blocks, block_size, groups, ..]. slots [rows], int64: the
// place of each row, counted over the blocks; -1: not stored. Without a value (undefined) only
// keys.
void store_in_slots_cuda(const at::Tensor& key,
                         const at::Tensor& value,
                         const at::Tensor& slots,
                         const at::Tensor& key_cache,
                         const at::Tensor& value_cache);

}  // namespace ferry::models
