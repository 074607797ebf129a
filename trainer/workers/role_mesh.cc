#include "trainer/workers/role_mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

namespace ferry::trainer {
namespace {

// "rank 3", "ranks 0-2, 4".
std::string in_words(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    for (end = begin + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    text += fmt::format("{}{}", begin == 0 ? "" : ", ", ranks[begin]);
    if (end - begin > 1) text += fmt::format("-{}", ranks[end - 1]);
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", text);
}

}  // namespace

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
