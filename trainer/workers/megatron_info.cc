#include "trainer/workers/megatron_info.h"

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

MegatronGlobalInfo get_megatron_global_info(const models::ParallelState& mesh) {
  const auto& shape = mesh.shape();
  return {.tp_size = shape.tp(),
          .dp_size = shape.dp(),
          .pp_size = shape.pp(),
          .cp_size = shape.cp(),
          .ep_size = shape.ep(),
          .etp_size = shape.etp()};
}

MegatronRankInfo get_megatron_rank_info(const models::ParallelState& mesh) {
  const auto& at = mesh.coordinates();
  return {.tp_rank = at.tp,
          .dp_rank = at.dp,
          .pp_rank = at.pp,
          .cp_rank = at.cp,
          .ep_rank = at.ep,
          .etp_rank = at.etp};
}

std::vector<std::string> describe(const std::vector<RoleMesh>& roles) {
  std::size_t width = 0;
  for (const auto& role : roles) width = std::max(width, in_words(role.ranks).size());
  std::vector<std::string> lines;
  for (const auto& [name, ranks, info] : roles) {
    lines.push_back(fmt::format("{:<10} {:<{}}  TP {}  PP {}  CP {}  EP {}  DP {}", name,
                                in_words(ranks), width, info.tp_size, info.pp_size, info.cp_size,
                                info.ep_size, info.dp_size));
  }
  return lines;
}

}  // namespace ferry::trainer
