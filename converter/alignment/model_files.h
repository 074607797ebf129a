// Loads a checkpoint into a parallel model by a plan: the checkpoint is one side, whatever its
// format, and the model's sharded_state_dict() is the other.
#pragma once

#include <memory>
#include <vector>

#include "converter/bridge/load.h"
#include "distckpt/plan/rank_group.h"
#include "models/gpt_model.h"
#include "models/vision/vision_model.h"

namespace ferry::converter {

distckpt::RankGroup rank_group(const models::ProcessGroup& group);

// Fills the chunks of this rank's stage. Called by all ranks of the mesh; throws as load() does. A
// critic that begins as a language model is of with_value_head(checkpoint.map.config), and asks for
// a new_head.
LoadReport load_model(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                      const Checkpoint& checkpoint,
                      LoadOptions options = {});

// The vision tower of a model, loaded. A rank holds it whole, and makes it by itself.
std::unique_ptr<models::VisionModel> make_vision_model(const models::TransformerConfig& config,
                                                       const models::ParallelState& mesh,
                                                       distckpt::DType dtype,
                                                       models::Alignment alignment,
                                                       const Checkpoint& checkpoint,
                                                       Amendment* amendment = nullptr);

}  // namespace ferry::converter
