#include <ATen/ATen.h>

#include "models/kernels/attention_cuda.h"
#include "models/kernels/paged_attention.h"

namespace ferry::models {

bool paged_attention_cuda_supports(const at::Tensor& query,
                                   const PagedKeys& keys,
                                   const AttentionOptions& options) {
  return query.is_cuda() && query.scalar_type() == at::kBFloat16 && !options.window &&
         gpu_attention_of(query.size(-1), keys.value.size(-1)) == GpuAttention::kFlash;
}

// Flash reads contiguous keys: every sequence's blocks are copied side by side, as many as the
// widest table has.
at::Tensor paged_attention_cuda(const at::Tensor& query,
                                const PagedKeys& keys,
                                const AttentionOptions& options) {
  const auto sequences = query.size(0);
  const auto longest = keys.block_tables.size(1) * keys.key.size(1);
  const auto blocks = keys.block_tables.flatten();
  const auto side_by_side = [&](const at::Tensor& cache) {
    return cache.index_select(0, blocks).flatten(0, 1);
  };
  return decode_attention_cuda(query,
                               {.key = side_by_side(keys.key),
                                .value = side_by_side(keys.value),
                                .begin = at::arange(sequences + 1, blocks.options()) * longest,
                                .lengths = keys.lengths,
                                .longest = longest},
                               options.scale);
}

}  // namespace ferry::models
