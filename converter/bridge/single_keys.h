// The shards of Megatron-Core's modules as save() has them: each layer and each expert under a key
// of its own.
#pragma once

#include <vector>

#include "converter/families/model_map.h"
#include "distckpt/plan/sharded_tensor.h"

namespace ferry::converter {

// Megatron-Core counts layers and experts by leading axes of a common key
// (transformer_layer.py, sharded_state_dict): "decoder.layers.mlp.linear_fc1.weight", box [3:4,
// ...] becomes "decoder.layers.3.mlp.linear_fc1.weight". Names of local layer specifications become
// those of Transformer Engine. Others stay as they are.
std::vector<distckpt::LocalShard> with_single_keys(const ModelMap& map,
                                                   std::vector<distckpt::LocalShard> shards);

}  // namespace ferry::converter
