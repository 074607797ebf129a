#include "converter/alignment/model_files.h"

#include <utility>

#include "distckpt/mesh_layout.h"
#include "models/device_box_io.h"
#include "models/parallel_state.h"

namespace ferry::converter {
namespace {

std::vector<distckpt::LocalShard> shards_of(
    const std::vector<std::unique_ptr<models::GPTModel>>& chunks) {
  std::vector<distckpt::LocalShard> all;
  for (const auto& chunk : chunks) {
    auto shards = chunk->sharded_state_dict();
    all.insert(all.end(), std::make_move_iterator(shards.begin()),
               std::make_move_iterator(shards.end()));
  }
  return all;
}

}  // namespace

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
  const auto mesh =
      distckpt::gather_mesh_layout(rank_group(model.mesh().all()), shards_of(chunks));
  const auto memory = models::make_memory_sink(mesh.layout);
  return load(checkpoint, mesh, *memory, options);
}

SaveReport save_model(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                      SaveOptions options) {
  const auto& model = *chunks.front();
  options.config = model.config();
  options.parallel = model.mesh().shape().parallel();
  const auto group = rank_group(model.mesh().all());
  const auto mesh = distckpt::gather_mesh_layout(group, shards_of(chunks));
  options.staging = models::staging_memory();
  const auto memory = models::make_memory_source(mesh.layout);
  return save(group, mesh, *memory, options);
}

}  // namespace ferry::converter
