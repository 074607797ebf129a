// The sequences that a data parallel rank gets of a batch, and those that run together: packs of
// varying lengths below a budget of tokens, as many on every rank. Pure functions of the lengths:
// ranks that know all lengths agree without talking, and each pipeline stage knows the shape of
// every micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/transformer/packed_sequences.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"
#include "trainer/plan/memory_advice.h"

namespace ferry::trainer {

// The sequences of each data parallel rank: the same number of each, of about the same work (verl
// ray_trainer._balance_batch). The short ones stand at both ends, where a pipeline is part empty.
// Throws Error(kUsage) if the number of sequences is no multiple of dp.
std::vector<Partition> balance_batch(std::span<const std::int64_t> seqlens, std::size_t dp);

struct DynamicBatchOptions {
  std::int64_t max_token_len = 16384;  // of a micro-batch: ppo_max_token_len_per_gpu times cp
  // Interleaved schedules run whole groups of so many micro-batches.
  std::size_t num_batches_divided_by = 1;
};

// [dp rank][micro-batch]: indices into the rank's own seqlens. All ranks have the same number of
// micro-batches, the fewest for which every one keeps the budget; they are of about the same work,
// small ones at both ends (verl rearrange_micro_batches). Throws Error(kUsage) for a sequence
// longer than the budget, or a rank that has fewer sequences than micro-batches are needed.
std::vector<std::vector<Partition>> rearrange_micro_batches(
    const std::vector<std::vector<std::int64_t>>& seqlens, const DynamicBatchOptions& options);

// `micro_batch_size` sequences after the others; the last may have fewer.
std::vector<Partition> split_micro_batches(std::size_t num_sequences, std::size_t micro_batch_size);

// The lengths on every rank of the group, in its order.
std::vector<std::vector<std::int64_t>> gather_seqlens(const models::ProcessGroup& dp,
                                                      std::span<const std::int64_t> mine);

// One behind another.
models::SamplingMask concat(const std::vector<models::SamplingMask>& masks);

// Each micro-batch as this rank runs it. `sequences`: [tokens] each, int64, on the host. `scored`:
// [tokens] each, bool, where logits are read; none: everywhere. `masks`: of those, with a row for
// each token, on the host; none: of the whole vocabulary. `visual`: their images.
std::vector<models::SequencePartition> pack_micro_batches(
    const std::vector<at::Tensor>& sequences,
    const std::vector<Partition>& parts,
    const models::ParallelState& mesh,
    const std::vector<at::Tensor>& scored = {},
    const std::vector<models::SamplingMask>& masks = {},
    const VisualSequences& visual = {});

// This rank's part of a batch, as its memory is planned.
BatchShape shape_of(std::span<const models::SequencePartition> batches, std::int64_t cp);

}  // namespace ferry::trainer
