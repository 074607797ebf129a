#include "converter/alignment/model_files.h"

#include <algorithm>
#include <utility>

#include "distckpt/plan/mesh_layout.h"
#include "models/distributed/parallel_state.h"
#include "models/pipeline_forward.h"
#include "models/reshard/device_box_io.h"

namespace ferry::converter {
distckpt::RankGroup rank_group(const models::ProcessGroup& group) {
  return {.rank = group.rank(), .size = group.size(), .all_gather_bytes = [&group](auto mine) {
            return group.all_gather_bytes(mine);
          }};
}

LoadReport load_model(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                      const Checkpoint& checkpoint,
                      LoadOptions options) {
  const auto& model = *chunks.front();
  options.config = model.config();
  const auto mesh = distckpt::gather_mesh_layout(rank_group(model.mesh().all()),
                                                 models::sharded_state_dict(chunks));
  const auto memory = models::make_memory_sink(mesh.layout);
  return load(checkpoint, mesh, *memory, options);
}

std::unique_ptr<models::VisionModel> make_vision_model(const models::TransformerConfig& config,
                                                       const models::ParallelState& mesh,
                                                       distckpt::DType dtype,
                                                       models::Alignment alignment,
                                                       const Checkpoint& checkpoint,
                                                       Amendment* amendment) {
  auto vision = std::make_unique<models::VisionModel>(config, mesh, dtype, alignment);
  auto shards = vision->sharded_state_dict();  // nobody else's
  for (auto& shard : shards) std::ranges::fill(shard.tensor.replica_id, 0);
  const auto alone = distckpt::gather_mesh_layout({}, std::move(shards));
  const auto memory = models::make_memory_sink(alone.layout);
  load(checkpoint, alone, *memory,
       {.config = config, .vision_tower = true, .round = true, .amendment = amendment});
  return vision;
}

}  // namespace ferry::converter
