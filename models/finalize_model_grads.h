// Makes the gradients of a backward pass those of the whole batch (Megatron-Core
// distributed/finalize_model_grads.py): sums what tensor parallel ranks, the ranks that hold copies
// of a parameter, and the two stages of a tied embedding have of each.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/gpt_model.h"

namespace ferry::models {

inline constexpr const char* kWordEmbeddings = "embedding.word_embeddings.weight";

// Called by all ranks of the mesh, once for all chunks of a stage: `chunks` are this rank's, first
// to last. Gradients are summed in the order of the ranks, not averaged. Parameters without a
// gradient on this rank get zeros.
void finalize_model_grads(const std::vector<GPTModel*>& chunks);

// Sums one gradient over `stages`, in their order, in place. Called by every rank of these stages.
void sum_over_stages(const ProcessGroup& pp, at::Tensor& gradient, const std::vector<int>& stages);

}  // namespace ferry::models
