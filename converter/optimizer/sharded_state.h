// The shards of a model that each rank of a mesh would save: the chunk grid of a Megatron
// checkpoint and its split into files.
#pragma once

#include <cstdint>
#include <vector>

#include "converter/families/model_map.h"
#include "distckpt/formats/torch_dist_writer.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

// A tensor of a module on one rank.
struct RankTensor {
  std::uint32_t megatron = 0;  // index into ModelMap::megatron
  int chunk = 0;               // of the rank's model chunks, where stages are interleaved
  distckpt::Shape shape{};     // of the whole tensor, padded
  // The parts that the rank holds, in the order of its memory: one box of the whole tensor, or one
  // of the gate and one of the up projection.
  std::vector<distckpt::Box> boxes{};
  std::vector<int> replica_id{};
};

// In the order of ranks (of one stage first, tensor parallel rank fastest, then the next stage).
// Throws Error(kUsage) if the model cannot be split so.
std::vector<std::vector<RankTensor>> rank_tensors(const ModelMap& map,
                                                  const models::ParallelConfig& parallel);

// One box of it as a checkpoint names it: key, axes of layers and experts before the others.
distckpt::ShardedTensor sharded_tensor(const ModelMap& map,
                                       const RankTensor& tensor,
                                       const distckpt::Box& box,
                                       distckpt::DType dtype);

// In the same order: what GPTModel::sharded_state_dict() gives there. `dtypes` are those of
// map.megatron. Throws Error(kUsage) if the model cannot be split so.
std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const models::ParallelConfig& parallel);

// The same of ranks that say themselves what they hold, each layer and each expert under a key of
// its own (single_key): main replicas, named as a checkpoint names them. A tied output layer is
// left out: it is the embedding. Extra states are dealt out among ranks that have something to
// write.
std::vector<distckpt::RankState> sharded_state(
    const ModelMap& map,
    const std::vector<distckpt::DType>& dtypes,
    const std::vector<std::vector<distckpt::ShardedTensor>>& ranks);

}  // namespace ferry::converter
