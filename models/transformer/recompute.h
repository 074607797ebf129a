// Activations that are computed again in the backward pass instead of being kept (Megatron-Core
// tensor_parallel/random.py, checkpoint, and its recompute_* settings; Chen et al. 2016). The
// second forward has the bits of the first, so gradients do not change.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "models/spec/recompute.h"

namespace ferry::models {

using Computation = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Returns body(inputs), and keeps only the inputs for the backward, which calls `body` again, on
// autograd's thread. `body` must therefore own everything that it refers to. Parameters that it
// uses get their gradients in that second call. Without gradients this is just body(inputs).
std::vector<at::Tensor> recompute(const Computation& body, const std::vector<at::Tensor>& inputs);

// Gives the memory of `output` back, which only the backward of `user` still reads: `again` makes
// the same tensor once more when the gradient of `user` has come (Megatron-Core
// tensor_parallel/random.py, CheckpointWithoutOutput). Both have a storage of their own. Without
// gradients this does nothing.
void discard_output(const at::Tensor& output,
                    const at::Tensor& user,
                    std::function<at::Tensor()> again);

}  // namespace ferry::models
