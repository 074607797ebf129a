#include "rollout/paged_context.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "models/kernels/attention/paged_attention.h"
#include "models/kernels/attention/paged_attention_host.h"

namespace ferry::rollout {

using models::AttentionSegment;

namespace {

// The chunks' rows, counted from the first of them, and their keys in the order of
// PagedContext::gather().
std::vector<AttentionSegment> segments_of(std::span<const Chunk> chunks) {
  std::vector<AttentionSegment> segments;
  std::int64_t key_begin = 0;
  for (const auto& chunk : chunks) {
    segments.push_back(
        {chunk.row_begin - chunks.front().row_begin, chunk.num_rows, key_begin, chunk.num_keys});
    key_begin += chunk.num_keys;
  }
  return segments;
}

// Neighbours with at most so many keys together, or one chunk.
std::vector<std::span<const Chunk>> parts_of(std::span<const Chunk> chunks, std::int64_t max_keys) {
  std::vector<std::span<const Chunk>> parts;
  while (!chunks.empty()) {
    std::size_t count = 1;
    auto keys = chunks.front().num_keys;
    while (count < chunks.size() && keys + chunks[count].num_keys <= max_keys)
      keys += chunks[count++].num_keys;
    parts.push_back(chunks.first(count));
    chunks = chunks.subspan(count);
  }
  return parts;
}

}  // namespace

void PagedContext::store(std::int64_t layer, const at::Tensor& key, const at::Tensor& value) {
  const auto& group = group_of(layer);
  cache_.store(layer, group.slots, key, value);
  if (group.copied_slots.defined()) cache_.copy(layer, group.copied_slots);
}

// Neighbours that are whole lie side by side in `own`; others are gathered from the cache together.
at::Tensor PagedContext::gather(std::int64_t layer,
                                const at::Tensor& cache,
                                const at::Tensor& own,
                                std::span<const Chunk> chunks) {
  std::vector<at::Tensor> parts;
  while (!chunks.empty()) {
    const bool whole = chunks.front().is_whole();
    const auto end = std::ranges::find(chunks, !whole, &Chunk::is_whole);
    const auto alike = chunks.first(static_cast<std::size_t>(end - chunks.begin()));
    const auto begin = alike.front().row_begin;
    parts.push_back(whole ? own.narrow(0, begin, alike.back().row_end() - begin)
                          : cache.flatten(0, 1).index_select(0, slots_of(layer, alike)));
    chunks = chunks.subspan(alike.size());
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

// The same for all layers of a group.
const at::Tensor& PagedContext::slots_of(std::int64_t layer, std::span<const Chunk> chunks) {
  const auto group = cache_.group_of(layer);
  auto& slots = slots_[{group, chunks.data(), chunks.size()}];
  if (slots.defined()) return slots;
  const auto in_block =
      at::arange(KVCache::kBlockSize, chunks.front().blocks.options().dtype(at::kLong));
  std::vector<at::Tensor> of_chunks;
  for (const auto& chunk : chunks) {
    const auto blocks = chunk.blocks.select(0, static_cast<std::int64_t>(group))
                            .narrow(0, 0, KVCache::blocks_of(chunk.num_keys));
    const auto all = blocks.unsqueeze(1) * KVCache::kBlockSize + in_block;
    of_chunks.push_back(all.flatten().narrow(0, 0, chunk.num_keys));
  }
  slots = at::cat(of_chunks);
  return slots;
}

// The rows of chunks, part by part, so that the keys that are gathered at a time are bounded:
// prompts may have long beginnings in common, each of which is gathered for each of them. `attend`
// gets the rows of its part alone. Rows before the chunks are left to the caller, those behind them
// are zeros.
at::Tensor PagedContext::in_parts(
    const at::Tensor& query,
    std::int64_t value_dim,
    std::size_t first,
    const std::function<at::Tensor(const at::Tensor& query, std::span<const Chunk> part)>& attend)
    const {
  const auto parts = parts_of(std::span(step_.chunks).subspan(first), step_.max_gathered_keys);
  const auto num_rows = [](std::span<const Chunk> part) {
    return part.back().row_end() - part.front().row_begin;
  };
  if (parts.size() == 1 && num_rows(parts.front()) == query.size(0))
    return attend(query, parts.front());
  auto all = query.new_empty({query.size(0), query.size(1), value_dim});
  std::int64_t end = 0;
  for (const auto& part : parts) {
    const auto begin = part.front().row_begin;
    const auto count = num_rows(part);
    all.narrow(0, begin, count).copy_(attend(query.narrow(0, begin, count), part));
    end = begin + count;
  }
  all.narrow(0, end, all.size(0) - end).zero_();
  return all;
}

// Sequences that are at least half as long as the longest of their part, in no more blocks than the
// cache has (gathered_bytes_per_block()).
const RowsByLength& PagedContext::by_length(at::Device device) {
  if (by_length_) return *by_length_;
  const auto decodes = static_cast<std::size_t>(step_.num_decodes);
  std::vector<std::int64_t> order(decodes);
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const auto blocks = [&](std::int64_t row) {
    return KVCache::blocks_of(step_.chunks[static_cast<std::size_t>(row)].num_keys);
  };
  std::ranges::stable_sort(order, std::greater<>(), blocks);
  auto& found = by_length_.emplace();
  for (std::size_t i = 0; i < decodes; ++i) {
    const auto here = blocks(order[i]);
    const bool joins =
        i > 0 && 2 * here >= found.parts.back().num_blocks &&
        (found.parts.back().count + 1) * found.parts.back().num_blocks <= cache_.num_blocks();
    if (!joins) found.parts.push_back({.begin = static_cast<std::int64_t>(i), .num_blocks = here});
    ++found.parts.back().count;
  }
  if (found.parts.size() > 1) found.order = at::tensor(order, at::kLong).to(device);
  return found;
}

at::Tensor PagedContext::attend_by_products(const at::Tensor& query,
                                            const models::PagedKeys& keys,
                                            const models::AttentionOptions& options) {
  const auto& [order, parts] = by_length(query.device());
  if (!order.defined()) return models::paged_attention_by_products(query, keys, options);
  const auto rows = query.index_select(0, order);
  const auto tables = keys.block_tables.index_select(0, order);
  const auto lengths = keys.lengths.index_select(0, order);
  std::vector<at::Tensor> attended;
  for (const auto& [begin, count, num_blocks] : parts)
    attended.push_back(models::paged_attention_by_products(
        rows.narrow(0, begin, count),
        {.key = keys.key,
         .value = keys.value,
         .block_tables = tables.narrow(0, begin, count).narrow(1, 0, num_blocks),
         .lengths = lengths.narrow(0, begin, count)},
        options));
  const auto all = at::cat(attended);
  return at::empty_like(all).index_copy_(0, order, all);
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
  const auto rows = query.narrow(0, 0, decodes);
  const auto keys = paged(layer, cache_.key(layer), cache_.value(layer));
  return with_chunks(has_kernel ? models::paged_attention_cuda(rows, keys, options)
                                : attend_by_products(rows, keys, options),
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
    return in_parts(
        query, up.weight.size(1) - up.key_dim, first,
        [&](const at::Tensor& rows, std::span<const Chunk> part) {
          const auto of_part = gather(layer, cache, latents.unsqueeze(1), part).squeeze(1);
          const auto keys = models::expand_latents(of_part, up);
          return models::attention(rows, keys.key, keys.value, segments_of(part), options);
        });
  };
  const auto decodes = step_.num_decodes;
  if (decodes == 0) return chunks(0);
  const bool has_kernel = models::paged_attention_cuda_supports(query.device(), query.scalar_type(),
                                                                cache.size(3), /*value_dim=*/0);
  const auto absorbed = models::absorb_query(query.narrow(0, 0, decodes), up);
  const auto keys = paged(layer, cache, cache.narrow(3, 0, up.rank()));
  const auto attended = has_kernel ? models::paged_attention_cuda(absorbed, keys, options)
                                   : attend_by_products(absorbed, keys, options);
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

at::Tensor PagedContext::attend_chunks(std::int64_t layer,
                                       const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       const models::AttentionOptions& options,
                                       std::size_t first) {
  const auto chunks = std::span(step_.chunks).subspan(first);
  if (std::ranges::all_of(chunks, &Chunk::is_whole)) {
    std::vector<AttentionSegment> segments;
    for (const auto& chunk : chunks)
      segments.push_back({chunk.row_begin, chunk.num_rows, chunk.row_begin, chunk.num_rows});
    return models::attention(query, key, value, segments, options);
  }
  return in_parts(query, value.size(2), first,
                  [&](const at::Tensor& rows, std::span<const Chunk> part) {
                    return models::attention(rows, gather(layer, cache_.key(layer), key, part),
                                             gather(layer, cache_.value(layer), value, part),
                                             segments_of(part), options);
                  });
}

}  // namespace ferry::rollout
