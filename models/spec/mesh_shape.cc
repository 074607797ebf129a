#include "models/spec/mesh_shape.h"

#include <utility>

#include "distckpt/base/error.h"

namespace ferry::models {

MeshShape::MeshShape(ParallelConfig parallel, int world_size)
    : parallel_(std::move(parallel)), world_size_(world_size) {
  for (const auto& [size, name] :
       {std::pair(tp(), "tp"), std::pair(cp(), "cp"), std::pair(pp(), "pp"), std::pair(ep(), "ep"),
        std::pair(etp(), "etp")}) {
    require(size >= 1, ErrorKind::kUsage, "{} is {}, it has to be 1 at least", name, size);
  }
  require(world_size_ % (tp() * cp() * pp()) == 0, ErrorKind::kUsage,
          "{} ranks are no multiple of tp {} x cp {} x pp {}", world_size_, tp(), cp(), pp());
  require(world_size_ % (etp() * ep() * pp()) == 0, ErrorKind::kUsage,
          "{} ranks are no multiple of etp {} x ep {} x pp {}", world_size_, etp(), ep(), pp());
}

MeshCoordinates MeshShape::coordinates(int rank) const {
  const int stage = world_size_ / pp();
  const int within = rank % stage;
  return {.tp = within % tp(),
          .cp = within / tp() % cp(),
          .dp = within / (tp() * cp()),
          .pp = rank / stage,
          .etp = within % etp(),
          .ep = within / etp() % ep(),
          .edp = within / (etp() * ep())};
}

}  // namespace ferry::models
