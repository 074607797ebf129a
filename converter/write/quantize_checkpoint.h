// A checkpoint whose weights are quantised on the way to a Hugging Face target.
#pragma once

#include <vector>

#include "converter/families/quantization.h"
#include "converter/open/checkpoint.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::converter {

// Replaces the weights of linear layers (kFp8), of those that the source holds in four bits
// (kFp8Lossless) or of experts (kMxfp4) in a checkpoint by their blocks and scales, which are
// computed when they are read, and says so in its config.json. Router, embedding, output layer and
// other small projections stay as they are. `tensors` are those of the checkpoint with the dtypes
// that they shall have before they are quantised, to which `cast` brings them. Throws Error(kUsage
// | kLayout) where there is nothing to quantise, or no form for it.
void quantize_checkpoint(Checkpoint& checkpoint,
                         std::vector<distckpt::ModelTensor>& tensors,
                         Quantization::Method method,
                         distckpt::Transform cast);

}  // namespace ferry::converter
