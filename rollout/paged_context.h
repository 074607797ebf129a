// One step of generation as attention sees it: rows of decoding sequences, one of each, then chunks
// of prompts, then rows that fill the step up and that nobody reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "models/kernels/attention/paged_attention.h"
#include "models/transformer/inference_context.h"
#include "rollout/kv_cache.h"

namespace ferry::rollout {

// Rows of a step that are the last ones of their sequence so far.
struct Chunk {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_keys = 0;  // those of the rows among them
  at::Tensor blocks{};        // [>= blocks of the keys], int32, on the cache's device

  bool is_whole() const { return num_keys == num_rows; }  // no keys but those of this step
};

struct PagedStep {
  at::Tensor slots{};         // [rows], int64; -1: of a row that nobody reads
  at::Tensor block_tables{};  // [num_decodes, max_blocks], int32
  at::Tensor lengths{};       // [num_decodes], int32
  std::int64_t num_decodes = 0;
  // The same, in numbers of the host, for attention that goes from sequence to sequence; then those
  // of prompts.
  std::vector<Chunk> chunks{};
  // [2, tokens], int64: KVCache::copy() once this step's rows are there; undefined: nothing.
  at::Tensor copied_slots{};
};

class PagedContext : public models::InferenceContext {
 public:
  // The cache outlives this.
  PagedContext(KVCache& cache, const PagedStep& step) : cache_(cache), step_(step) {}

  std::optional<models::DecodedRow> only_row() const override;
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

 private:
  void store(std::int64_t layer, const at::Tensor& key, const at::Tensor& value);
  at::Tensor attend_chunks(std::int64_t layer,
                           const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const models::AttentionOptions& options,
                           std::size_t first) const;
  at::Tensor with_chunks(const at::Tensor& decoded,
                         std::int64_t rows,
                         const std::function<at::Tensor(std::size_t first)>& chunks) const;
  models::PagedKeys paged(const at::Tensor& key, const at::Tensor& value) const;

  KVCache& cache_;
  const PagedStep& step_;
};

}  // namespace ferry::rollout
