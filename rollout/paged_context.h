// One step of generation as attention sees it: one row of each decoding sequence, then chunks of
// prompts, then padding rows, which nobody reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "models/kernels/attention/paged_attention.h"
#include "models/transformer/inference_context.h"
#include "rollout/kv_cache.h"

namespace ferry::rollout {

// The rows of one sequence in a step. They see its earlier keys and their own.
struct Chunk {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_keys = 0;  // with those of the rows
  // [groups, >= KVCache::blocks_of(num_keys)], int32, on the cache's device
  at::Tensor blocks{};

  std::int64_t row_end() const { return row_begin + num_rows; }
  bool is_whole() const { return num_keys == num_rows; }  // all keys are of this step
};

// The places of a step's rows in a group of layers (KVCacheGroups).
struct PagedGroup {
  at::Tensor slots{};         // [rows], int64; -1: a padding row
  at::Tensor block_tables{};  // [num_decodes, max_blocks], int32
  // [2, tokens], int64: arguments of KVCache::copy() after this step's rows are stored; undefined:
  // no copy.
  at::Tensor copied_slots{};
};

struct PagedStep {
  std::vector<PagedGroup> groups{};
  at::Tensor lengths{};  // [num_decodes], int32
  std::int64_t num_decodes = 0;
  // The decoding rows, one by one, then those of prompts, for attention by sequences.
  std::vector<Chunk> chunks{};
  // Keys of chunks that are gathered from the cache at a time: models::max_gathered_keys().
  std::int64_t max_gathered_keys = 0;
  bool equal_rows = false;  // InferenceContext::has_equal_rows()
  models::LinearRows linear{};
};

// Decoding rows in the order of their lengths, the longest first, and those whose keys are
// gathered together.
struct RowsByLength {
  struct Part {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    std::int64_t num_blocks = 0;  // of the longest
  };
  at::Tensor order{};  // [num_decodes], int64; undefined: there is one part
  std::vector<Part> parts{};
};

class PagedContext : public models::InferenceContext {
 public:
  // The cache outlives this.
  PagedContext(KVCache& cache, const PagedStep& step) : cache_(cache), step_(step) {}

  std::optional<models::DecodedRow> only_row() const override;
  bool has_equal_rows() const override { return step_.equal_rows; }
  at::Tensor attend(std::int64_t layer,
                    const at::Tensor& query,
                    const at::Tensor& key,
                    const at::Tensor& value,
                    const models::AttentionOptions& options) override;
  at::Tensor attend_latents(std::int64_t layer,
                            const at::Tensor& query,
                            const at::Tensor& latents,
                            const models::LatentUpProjection& up,
                            const models::AttentionOptions& options) override;
  const models::LinearRows& linear_rows() const override { return step_.linear; }
  const models::LinearStates& linear_states(std::int64_t layer) const override {
    return cache_.states(layer);
  }

 private:
  void store(std::int64_t layer, const at::Tensor& key, const at::Tensor& value);
  at::Tensor attend_chunks(std::int64_t layer,
                           const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const models::AttentionOptions& options,
                           std::size_t first);
  at::Tensor in_parts(const at::Tensor& query,
                      std::int64_t value_dim,
                      std::size_t first,
                      const std::function<at::Tensor(const at::Tensor& query,
                                                     std::span<const Chunk> part)>& attend) const;
  const RowsByLength& by_length(at::Device device);
  at::Tensor attend_by_products(const at::Tensor& query,
                                const models::PagedKeys& keys,
                                const models::AttentionOptions& options);
  at::Tensor with_chunks(const at::Tensor& decoded,
                         std::int64_t rows,
                         const std::function<at::Tensor(std::size_t first)>& chunks) const;
  const PagedGroup& group_of(std::int64_t layer) const {
    return step_.groups[cache_.group_of(layer)];
  }
  // The keys of chunks, one sequence after the other: [keys, groups, dim]. own: those of the step's
  // rows.
  at::Tensor gather(std::int64_t layer,
                    const at::Tensor& cache,
                    const at::Tensor& own,
                    std::span<const Chunk> chunks);
  // Slots of the keys of chunks in a layer's cache, one sequence after the other: [keys], int64.
  const at::Tensor& slots_of(std::int64_t layer, std::span<const Chunk> chunks);
  models::PagedKeys paged(std::int64_t layer, const at::Tensor& key, const at::Tensor& value) const;

  KVCache& cache_;
  const PagedStep& step_;
  std::optional<RowsByLength> by_length_;  // once it was asked for
  // Results of slots_of(), by group, first chunk and number of chunks.
  std::map<std::tuple<std::size_t, const Chunk*, std::size_t>, at::Tensor> slots_;
};

}  // namespace ferry::rollout
