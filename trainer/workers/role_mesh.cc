#include "trainer/workers/role_mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "trainer/plan/memory_advice.h"

namespace ferry::trainer {

std::string describe(const models::MeshShape& shape) {
  return fmt::format("TP {}  PP {}  CP {}  EP {}  DP {}", shape.tp(), shape.pp(), shape.cp(),
                     shape.ep(), shape.dp());
}

std::vector<std::string> describe(const std::vector<RoleMesh>& roles) {
  std::size_t width = 0;
  for (const auto& role : roles) width = std::max(width, in_words(role.ranks).size());
  std::vector<std::string> lines;
  for (const auto& [name, ranks, shape] : roles)
    lines.push_back(fmt::format("{:<10} {:<{}}  {}", name, in_words(ranks), width, shape));
  return lines;
}

}  // namespace ferry::trainer
