#include "models/kernels/attention/paged_attention.h"

#include <ATen/ATen.h>

#include <limits>

#include "models/kernels/whole_vectors.h"

namespace ferry::models {

at::Tensor paged_attention_by_products(const at::Tensor& query,
                                       const PagedKeys& keys,
                                       const AttentionOptions& options) {
  const auto sequences = query.size(0);
  const auto groups = keys.key.size(2);
  const auto longest = keys.block_tables.size(1) * keys.key.size(1);
  const auto blocks = keys.block_tables.flatten();
  const auto by_group = [&](const at::Tensor& cache) {  // [sequences, groups, longest, dim]
    return cache.index_select(0, blocks)
        .view({sequences, longest, groups, cache.size(3)})
        .transpose(1, 2);
  };
  const auto key = by_group(keys.key);
  // Values of latents are the first channels of their keys.
  const auto value = keys.value.is_alias_of(keys.key) ? key.narrow(3, 0, keys.value.size(3))
                                                      : by_group(keys.value);
  const auto q = query.view({sequences, groups, query.size(1) / groups, query.size(2)});
  const auto scores = at::matmul(q, key.transpose(2, 3)) * options.scale;
  const auto place = at::arange(longest, keys.lengths.options()).unsqueeze(0);
  const auto length = keys.lengths.clamp_min(1).unsqueeze(1);  // [sequences, 1]
  auto hidden = place >= length;
  if (options.window) hidden = hidden.logical_or(place < length - *options.window);
  const auto masked = soft_capped(scores, options.softcap)
                          .masked_fill(hidden.view({sequences, 1, 1, longest}),
                                       -std::numeric_limits<double>::infinity());
  const auto by_heads = masked.view({sequences, query.size(1), 1, longest});
  const auto weights = attention_weights(by_heads, options.sinks).reshape(masked.sizes());
  return at::matmul(weights, value).view({sequences, query.size(1), value.size(3)});
}

}  // namespace ferry::models
