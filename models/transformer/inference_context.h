// The interface between attention and the cache in generation (Megatron-Core's inference_context):
// it knows the place of the keys and values of earlier tokens, and the sequence of each row. The
// engine of rollout/ implements it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "models/kernels/attention/attention.h"
#include "models/kernels/attention/latent_attention.h"

namespace ferry::models {

// The place in the cache of a step's only row, which continues its sequence.
struct DecodedRow {
  at::Tensor slot{};  // [1], int64: of the row's key, counted over the blocks; -1: not stored
  at::Tensor block_table{};  // [max_blocks], int32: of the sequence, blocks of 64 keys
  at::Tensor length{};       // [1], int32: keys of the sequence, the row's own among them
  std::vector<std::pair<at::Tensor, at::Tensor>>
      cache{};  // of each layer, [blocks, 64, groups, dim]
};

// The rows of one sequence in a step.
struct SequenceRows {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_computed = 0;  // tokens of the sequence before these
  std::int64_t slot = 0;          // of its states
};

// The sequences of a step as linear attention sees them. Each row is in one of both.
struct LinearRows {
  std::vector<SequenceRows> chunks{};   // sequences that begin, or have several rows
  std::vector<SequenceRows> decodes{};  // sequences that continue with one row
  at::Tensor decode_rows{};             // [decodes], int64, on the device: the row of each
  at::Tensor decode_slots{};            // [decodes], int64: its slot
};

// The states of one layer with a gated delta net, by slots (LinearStateShape). A sequence that
// begins finds any values in its slot.
struct LinearStates {
  at::Tensor conv{};       // [slots, kernel - 1, channels]
  at::Tensor recurrent{};  // [slots, heads, key_dim, value_dim], fp32
  // On the host in kBitwise the rows behind the last whole chunk, whose end `recurrent` is the
  // state of.
  at::Tensor mixed{};  // [slots, rows, channels]
  at::Tensor decay{};  // [slots, rows, heads], fp32
  at::Tensor beta{};   // [slots, rows, heads]
};

class InferenceContext {
 public:
  virtual ~InferenceContext() = default;

  // The only row of this step; nullopt if there are several rows, or the row is not a decoded one.
  virtual std::optional<DecodedRow> only_row() const { return std::nullopt; }

  // True if all ranks that share experts have as many rows in this step, and few: they may exchange
  // all of them.
  virtual bool has_equal_rows() const { return false; }

  // Keeps the keys and values of this step's rows in the cache of `layer`, then attends each row to
  // its own sequence so far. query [rows, heads, dim], key [rows, groups, dim], value [rows,
  // groups, value_dim] -> [rows, heads, value_dim].
  virtual at::Tensor attend(std::int64_t layer,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const AttentionOptions& options) = 0;

  // Does the same for multi-latent attention, whose cache keeps a token's latent and the rotated
  // part of its key, `latents` [rows, rank + rotated]. query [rows, heads, key_dim + rotated] ->
  // [rows, heads, value_dim].
  virtual at::Tensor attend_latents(std::int64_t layer,
                                    const at::Tensor& query,
                                    const at::Tensor& latents,
                                    const LatentUpProjection& up,
                                    const AttentionOptions& options) = 0;

  // This step's sequences, and the states of `layer`, which linear attention reads and writes.
  virtual const LinearRows& linear_rows() const = 0;
  virtual const LinearStates& linear_states(std::int64_t layer) const = 0;
};

}  // namespace ferry::models
