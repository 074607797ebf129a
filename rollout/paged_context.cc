#include "rollout/paged_context.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

#include "models/kernels/attention/paged_attention.h"
#include "models/kernels/attention/paged_attention_host.h"

namespace ferry::rollout {

using models::AttentionSegment;

namespace {

// The first `num_keys` rows of a sequence: [num_keys, groups, dim].
at::Tensor gathered(const at::Tensor& cache, const at::Tensor& blocks, std::int64_t num_keys) {
  const auto used = blocks.narrow(0, 0, KVCache::blocks_of(num_keys));
  return cache.index_select(0, used).flatten(0, 1).narrow(0, 0, num_keys);
}

// The chunks' rows, and their keys in the order of PagedContext::gather().
std::vector<AttentionSegment> segments_of(std::span<const Chunk> chunks) {
  std::vector<AttentionSegment> segments;
  std::int64_t key_begin = 0;
  for (const auto& chunk : chunks) {
    segments.push_back({chunk.row_begin, chunk.num_rows, key_begin, chunk.num_keys});
    key_begin += chunk.num_keys;
  }
  return segments;
}

}  // namespace

void PagedContext::store(std::int64_t layer, const at::Tensor& key, const at::Tensor& value) {
  const auto& group = group_of(layer);
  cache_.store(layer, group.slots, key, value);
  if (group.copied_slots.defined()) cache_.copy(layer, group.copied_slots);
}

// The keys of all chunks, one sequence after the other: [keys, groups, dim].
at::Tensor PagedContext::gather(std::int64_t layer,
                                const at::Tensor& cache,
                                std::span<const Chunk> chunks) const {
  const auto group = static_cast<std::int64_t>(cache_.group_of(layer));
  std::vector<at::Tensor> of_chunks;
  for (const auto& chunk : chunks)
    of_chunks.push_back(gathered(cache, chunk.blocks.select(0, group), chunk.num_keys));
  return at::cat(of_chunks);
}

std::optional<models::DecodedRow> PagedContext::only_row() const {
  const auto& group = step_.groups.front();
  if (step_.groups.size() > 1 || group.slots.size(0) != 1 || step_.num_decodes != 1 ||
      group.copied_slots.defined())
    return std::nullopt;
  return models::DecodedRow{.slot = group.slots,
                            .block_table = group.block_tables[0],
                            .length = step_.lengths,
                            .cache = cache_.layers()};
}

// Decoded rows take a kernel of their own if there is one that keeps their bits.
at::Tensor PagedContext::attend(std::int64_t layer,
                                const at::Tensor& query,
                                const at::Tensor& key,
                                const at::Tensor& value,
                                const models::AttentionOptions& options) {
  store(layer, key, value);
  const auto chunks = [&](std::size_t first) {
    return attend_chunks(layer, query, key, value, options, first);
  };
  const bool has_kernel =
      !options.softcap && models::paged_attention_cuda_supports(query.device(), query.scalar_type(),
                                                                query.size(2), value.size(2));
  const auto decodes = step_.num_decodes;
  if (decodes > 0 && !has_kernel) {
    const auto decoded = models::paged_attention_host(
        query.narrow(0, 0, decodes), paged(layer, cache_.key(layer), cache_.value(layer)), options);
    if (decoded.defined()) return with_chunks(decoded, query.size(0), chunks);
  }
  if (decodes == 0 || (!has_kernel && options.alignment == models::Alignment::kBitwise))
    return chunks(0);
  const auto kernel =
      has_kernel ? models::paged_attention_cuda : models::paged_attention_by_products;
  return with_chunks(kernel(query.narrow(0, 0, decodes),
                            paged(layer, cache_.key(layer), cache_.value(layer)), options),
                     query.size(0), chunks);
}

// Decoded rows attend to latents, with the up-projections absorbed; chunks of prompts attend to
// expanded keys and values, which is less work for many rows.
at::Tensor PagedContext::attend_latents(std::int64_t layer,
                                        const at::Tensor& query,
                                        const at::Tensor& latents,
                                        const models::LatentUpProjection& up,
                                        const models::AttentionOptions& options) {
  store(layer, latents.unsqueeze(1), {});
  const auto& cache = cache_.key(layer);
  const auto chunks = [&](std::size_t first) {
    const auto rest = std::span(step_.chunks).subspan(first);
    const auto keys = models::expand_latents(gather(layer, cache, rest).squeeze(1), up);
    return models::attention(query, keys.key, keys.value, segments_of(rest), options);
  };
  const auto decodes = step_.num_decodes;
  if (decodes == 0) return chunks(0);
  const auto attend = models::paged_attention_cuda_supports(query.device(), query.scalar_type(),
                                                            cache.size(3), /*value_dim=*/0)
                          ? models::paged_attention_cuda
                          : models::paged_attention_by_products;
  const auto attended = attend(models::absorb_query(query.narrow(0, 0, decodes), up),
                               paged(layer, cache, cache.narrow(3, 0, up.rank())), options);
  return with_chunks(models::project_values(attended, up), query.size(0), chunks);
}

models::PagedKeys PagedContext::paged(std::int64_t layer,
                                      const at::Tensor& key,
                                      const at::Tensor& value) const {
  return {.key = key,
          .value = value,
          .block_tables = group_of(layer).block_tables,
          .lengths = step_.lengths};
}

// The decoded rows, followed by the result of `chunks` for the others.
at::Tensor PagedContext::with_chunks(
    const at::Tensor& decoded,
    std::int64_t rows,
    const std::function<at::Tensor(std::size_t first)>& chunks) const {
  const auto decodes = step_.num_decodes;
  if (decodes == rows) return decoded;
  if (static_cast<std::size_t>(decodes) == step_.chunks.size()) {  // only padding rows
    return at::constant_pad_nd(decoded, {0, 0, 0, 0, 0, rows - decodes});
  }
  auto all = chunks(static_cast<std::size_t>(decodes));
  all.narrow(0, 0, decodes).copy_(decoded);
  return all;
}

// Chunks that are whole use the step's own keys and values; others gather theirs from the cache.
at::Tensor PagedContext::attend_chunks(std::int64_t layer,
                                       const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       const models::AttentionOptions& options,
                                       std::size_t first) const {
  const auto chunks = std::span(step_.chunks).subspan(first);
  if (std::ranges::all_of(chunks, &Chunk::is_whole)) {
    std::vector<AttentionSegment> segments;
    for (const auto& chunk : chunks)
      segments.push_back({chunk.row_begin, chunk.num_rows, chunk.row_begin, chunk.num_rows});
    return models::attention(query, key, value, segments, options);
  }
  return models::attention(query, gather(layer, cache_.key(layer), chunks),
                           gather(layer, cache_.value(layer), chunks), segments_of(chunks),
                           options);
}

}  // namespace ferry::rollout
