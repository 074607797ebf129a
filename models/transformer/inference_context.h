// What attention asks in generation (Megatron-Core's inference_context): where the keys and values
// of earlier tokens are kept, and which sequence each row belongs to. The engine of rollout/
// answers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "models/kernels/attention/attention.h"
#include "models/kernels/attention/latent_attention.h"

namespace ferry::models {

// Where the keys and values of the only row of a step lie, that follows its sequence so far.
struct DecodedRow {
  at::Tensor slot{};         // [1], int64: of its own, counted over the blocks; -1: kept nowhere
  at::Tensor block_table{};  // [max_blocks], int32: of the sequence, blocks of 64 keys
  at::Tensor length{};       // [1], int32: keys of the sequence, the row's own among them
  std::vector<std::pair<at::Tensor, at::Tensor>>
      cache{};  // of each layer, [blocks, 64, groups, dim]
};

class InferenceContext {
 public:
  virtual ~InferenceContext() = default;

  // None: the rows of this step are more, or no decoded ones.
  virtual std::optional<DecodedRow> only_row() const { return std::nullopt; }

  // Keeps the keys and values of this step's rows in the cache of `layer`, then attends each row to
  // its own sequence so far. query [rows, heads, dim], key [rows, groups, dim], value [rows,
  // groups, value_dim] -> [rows, heads, value_dim].
  virtual at::Tensor attend(std::int64_t layer,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const AttentionOptions& options) = 0;

  // The same of multi-latent attention that keeps a token's latent and the rotated part of its key,
  // `latents` [rows, rank + rotated]. query [rows, heads, key_dim + rotated] -> [rows, heads,
  // value_dim].
  virtual at::Tensor attend_latents(std::int64_t layer,
                                    const at::Tensor& query,
                                    const at::Tensor& latents,
                                    const LatentUpProjection& up,
                                    const AttentionOptions& options) = 0;
};

}  // namespace ferry::models
