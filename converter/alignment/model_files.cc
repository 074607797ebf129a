#include "converter/alignment/model_files.h"

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

LoadReport load_vision_model(const models::VisionModel& vision,
                             const Checkpoint& checkpoint,
                             LoadOptions options) {
  options.vision_tower = true;
  const auto mesh =
      distckpt::gather_mesh_layout(rank_group(vision.mesh().all()), vision.sharded_state_dict());
  const auto memory = models::make_memory_sink(mesh.layout);
  return load(checkpoint, mesh, *memory, options);
}

}  // namespace ferry::converter
