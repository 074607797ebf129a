#include "rollout/paged_context.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "models/kernels/paged_attention.h"

namespace ferry::rollout {

using models::AttentionSegment;

namespace {

// The first `num_keys` rows of a sequence: [num_keys, groups, dim].
at::Tensor gather(const at::Tensor& cache, const at::Tensor& blocks, std::int64_t num_keys) {
  const auto count = (num_keys + KVCache::kBlockSize - 1) / KVCache::kBlockSize;
  return cache.index_select(0, blocks.narrow(0, 0, count)).flatten(0, 1).narrow(0, 0, num_keys);
}

}  // namespace

at::Tensor PagedContext::attend(std::int64_t layer,
                                const at::Tensor& query,
                                const at::Tensor& key,
                                const at::Tensor& value,
                                const models::AttentionOptions& options) {
  cache_.store(layer, step_.slots, key, value);
  const models::PagedKeys paged{.key = cache_.key(layer),
                                .value = cache_.value(layer),
                                .block_tables = step_.block_tables,
                                .lengths = step_.lengths};
  const auto decodes = step_.num_decodes;
  if (decodes == 0 || !models::paged_attention_cuda_supports(query.device(), query.scalar_type(),
                                                             query.size(2), value.size(2)))
    return attend_chunks(layer, query, key, value, options, 0);
  const auto decoded = models::paged_attention_cuda(query.narrow(0, 0, decodes), paged, options);
  if (decodes == query.size(0)) return decoded;
  auto all = attend_chunks(layer, query, key, value, options, static_cast<std::size_t>(decodes));
  all.narrow(0, 0, decodes).copy_(decoded);
  return all;
}

// Keys of chunks that are whole are at hand; those of the others come together out of the cache.
at::Tensor PagedContext::attend_chunks(std::int64_t layer,
                                       const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       const models::AttentionOptions& options,
                                       std::size_t first) const {
  std::vector<AttentionSegment> segments;
  std::vector<at::Tensor> keys;
  std::vector<at::Tensor> values;
  const auto chunks = std::span(step_.chunks).subspan(first);
  if (std::ranges::all_of(chunks, &Chunk::is_whole)) {
    for (const auto& chunk : chunks)
      segments.push_back({chunk.row_begin, chunk.num_rows, chunk.row_begin, chunk.num_rows});
    return models::attention(query, key, value, segments, options);
  }
  std::int64_t key_begin = 0;
  for (const auto& chunk : chunks) {
    segments.push_back({chunk.row_begin, chunk.num_rows, key_begin, chunk.num_keys});
    key_begin += chunk.num_keys;
    keys.push_back(gather(cache_.key(layer), chunk.blocks, chunk.num_keys));
    values.push_back(gather(cache_.value(layer), chunk.blocks, chunk.num_keys));
  }
  return models::attention(query, at::cat(keys), at::cat(values), segments, options);
}

}  // namespace ferry::rollout
