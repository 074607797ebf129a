// The experts of a layer as tensors of their own.
#pragma once

#include <vector>

#include "converter/open/checkpoint.h"

namespace ferry::converter {

// Takes the experts of a layer apart that a checkpoint has in one tensor, if its family also has
// names for each (Qwen3.5, whose FP8 is published so). `tensors` are those of the checkpoint with
// the dtypes that they shall have. Throws Error(kLayout) for a source that holds them quantised, or
// in parts that are no boxes.
void separate_experts(Checkpoint& checkpoint, std::vector<distckpt::ModelTensor>& tensors);

}  // namespace ferry::converter
