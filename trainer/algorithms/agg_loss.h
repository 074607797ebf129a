// The losses of tokens as one number (verl trainer/ppo/core_algos.py agg_loss). What the
// sum is divided by is counted over the whole mini-batch and handed in, so that parts add up: the
// loss does not depend on the cut into micro-batches, nor on the number of ranks (verl's dp_size is
// 1: here gradients are summed).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trainer/config/ppo_choices.h"

namespace ferry::trainer {

// Counts of the mini-batch, on all ranks together; a mode reads the one that it divides by.
struct GlobalBatchInfo {
  std::int64_t batch_num_tokens = 0;   // ones of the response masks
  std::int64_t global_batch_size = 0;  // sequences, also those without a token that counts
  double loss_scale_factor = 0;        // a length of responses that does not change: the longest
};

// loss_mat [sequences, response], fp32; loss_mask the same, bool or int64. Differentiable. Throws
// Error(kUsage) if a count that the mode needs is not there.
at::Tensor agg_loss(const at::Tensor& loss_mat,
                    const at::Tensor& loss_mask,
                    LossAggMode mode,
                    const GlobalBatchInfo& info);

}  // namespace ferry::trainer
