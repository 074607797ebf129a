#include "models/distributed/parallel_state.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"

namespace ferry::models {
namespace {

std::vector<int> all_if_none(std::vector<int> ranks, const World& world) {
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(world.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  const bool ascending = std::ranges::adjacent_find(ranks, std::greater_equal()) == ranks.end();
  require(ascending && ranks.front() >= 0 && ranks.back() < world.size(), ErrorKind::kUsage,
          "ranks {} of a mesh: they have to ascend, below {}", fmt::join(ranks, ", "),
          world.size());
  return ranks;
}

// This rank's number in the mesh.
int number_of(const World& world, const std::vector<int>& ranks, const std::string& name) {
  const auto me = std::ranges::find(ranks, world.rank());
  require(me != ranks.end(), ErrorKind::kBug, "rank {} is not of the mesh {}", world.rank(), name);
  return static_cast<int>(me - ranks.begin());
}

// The mesh's ranks whose coordinates equal `mine` on every axis except those that `move` resets.
template <typename Move>
std::vector<int> ranks_like(const std::vector<int>& ranks,
                            const MeshShape& shape,
                            const MeshCoordinates& mine,
                            Move&& move) {
  std::vector<int> like;
  for (int number = 0; number < shape.world_size(); ++number) {
    const auto there = shape.coordinates(number);
    if (move(there) == move(mine)) like.push_back(ranks[static_cast<std::size_t>(number)]);
  }
  return like;
}

}  // namespace

ParallelState::ParallelState(World& world,
                             const ParallelConfig& parallel,
                             const std::string& name,
                             std::vector<int> ranks)
    : world_(&world),
      ranks_(all_if_none(std::move(ranks), world)),
      shape_(parallel, static_cast<int>(ranks_.size())),
      coordinates_(shape_.coordinates(number_of(world, ranks_, name))) {
  using At = MeshCoordinates;
  const auto group = [&](const char* axis, auto&& forget) {
    const auto move = [&](At at) {
      forget(at);
      return at;
    };
    return ProcessGroup(world, name + "/" + axis, ranks_like(ranks_, shape_, coordinates_, move));
  };
  // A dense axis leaves the experts' coordinates out of the comparison, and the other way round.
  const auto dense = [](At& at) { at.etp = at.ep = at.edp = 0; };
  const auto expert = [](At& at) { at.tp = at.cp = at.dp = 0; };
  all_ = group("all", [](At& at) { at = {}; });
  tp_ = group("tp", [&](At& at) { dense(at), at.tp = 0; });
  cp_ = group("cp", [&](At& at) { dense(at), at.cp = 0; });
  dp_ = group("dp", [&](At& at) { dense(at), at.dp = 0; });
  dp_cp_ = group("dp_cp", [&](At& at) { dense(at), at.dp = at.cp = 0; });
  pp_ = group("pp", [&](At& at) { dense(at), at.pp = 0; });
  ep_ = group("ep", [&](At& at) { expert(at), at.ep = 0; });
  etp_ = group("etp", [&](At& at) { expert(at), at.etp = 0; });
  edp_ = group("edp", [&](At& at) { expert(at), at.edp = 0; });
}

}  // namespace ferry::models
