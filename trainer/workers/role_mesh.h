// The meshes of roles, as people are told of them.
#pragma once

#include <string>
#include <vector>

#include "models/distributed/parallel_state.h"

namespace ferry::trainer {

struct RoleMesh {
  std::string name{};
  std::vector<int> ranks{};  // of the world, ascending
  std::string shape{};       // describe() of its mesh
};

// "TP 2  PP 1  CP 1  EP 1  DP 2"
std::string describe(const models::MeshShape& shape);

// A line each, in columns: "actor      ranks 0-3  TP 2  PP 1  CP 1  EP 1  DP 2".
std::vector<std::string> describe(const std::vector<RoleMesh>& roles);

}  // namespace ferry::trainer
