// What each rank of a mesh would save of a model: the chunk grid of a Megatron checkpoint and its
// split into files.
#pragma once

#include <vector>

#include "converter/model_map.h"
#include "distckpt/parallel_config.h"
#include "distckpt/torch_dist_writer.h"

namespace ferry::converter {

// In the order of ranks (of one stage first, tensor parallel rank fastest, then the next stage):
// the tensors that GPTModel::sharded_state_dict() gives there. `dtypes` are those of map.megatron.
// Throws Error(kUsage) if the model cannot be split so.
std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const distckpt::ParallelConfig& parallel);

}  // namespace ferry::converter
