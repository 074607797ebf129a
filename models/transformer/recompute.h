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

// What `body` makes of the inputs, of which alone the backward needs memory. Parameters that `body`
// computes with get their gradients when it is computed again; where no gradients are wanted this
// is body(inputs). `body` holds all it refers to: it is called once more, later, on autograd's
// thread.
std::vector<at::Tensor> recompute(const Computation& body, const std::vector<at::Tensor>& inputs);

}  // namespace ferry::models
