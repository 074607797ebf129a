// Makes the gradients of a backward pass those of the whole batch (Megatron-Core
// distributed/finalize_model_grads.py): sums what tensor parallel ranks, the ranks that hold copies
// of a parameter, and the two stages of a tied embedding have of each.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/gpt_model.h"

namespace ferry::models {

inline constexpr const char* kWordEmbeddings = "embedding.word_embeddings.weight";

// Called by all ranks of the mesh, for each chunk of a stage at once: `chunks` are this rank's,
// first to last. Sums, in the order of the ranks: nothing is averaged. Parameters without a
// gradient on this rank get zeros.
void finalize_model_grads(const std::vector<GPTModel*>& chunks);

// What those stages have of one gradient becomes the sum, in their order. Called by all of them.
void sum_over_stages(const ProcessGroup& pp, at::Tensor& gradient, const std::vector<int>& stages);

}  // namespace ferry::models
