// The meshes that a run might have, planned one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cli/report/plan.h"

namespace ferry::cli {

struct MeshSpace {
  int ranks = 1;
  int ranks_per_host = 8;  // tensor parallel ranks are of one host
  std::int64_t layers = 1;
  std::int64_t experts = 0;
  std::string engine{};   // the section of the learner's mesh
  std::string rollout{};  // that of the rollout's, or empty
  // Keys that keep their value.
  std::set<std::string> fixed{};
};

// Plans the run with sizes that are powers of two: first the rollout with the learner's mesh, then
// those of it that take the fewest seconds with other meshes of the rollout. `plan` is called by
// several threads; meshes for which it throws Error(kUsage) are not possible, and its first such
// error is thrown if none is.
PlannedMeshes plan_meshes(
    const MeshSpace& space,
    const std::function<trainer::PlannedRun(const std::vector<std::string>& settings)>& plan,
    std::size_t count);

}  // namespace ferry::cli
