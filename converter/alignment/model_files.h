// A parallel model and a checkpoint: loading and saving by plans. The model's sharded_state_dict()
// is one side of the plan, whatever format the checkpoint has is the other.
#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "converter/bridge/load.h"
#include "converter/bridge/save.h"
#include "distckpt/plan/rank_group.h"
#include "models/gpt_model.h"

namespace ferry::converter {

distckpt::RankGroup rank_group(const models::ProcessGroup& group);

// Fills the chunks of this rank's stage. Called by all ranks of the mesh; throws as load() does. A
// critic that begins as a language model is of with_value_head(checkpoint.map.config), and asks for
// a new_head.
LoadReport load_model(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                      const Checkpoint& checkpoint,
                      LoadOptions options = {});

// Writes an iteration of a Megatron-Core checkpoint from the chunks of all ranks' stages.
SaveReport save_model(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                      SaveOptions options);

}  // namespace ferry::converter
