// The gradient of an embedding that several stages have (Megatron-Core
// distributed/finalize_model_grads.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/distributed/process_group.h"

namespace ferry::models {

inline constexpr const char* kWordEmbeddings = "embedding.word_embeddings.weight";

// Sums one gradient over `stages`, in their order, in place. Called by every rank of these stages.
void sum_over_stages(const ProcessGroup& pp, at::Tensor& gradient, const std::vector<int>& stages);

}  // namespace ferry::models
