// What ranks are told of a role's mesh (verl's MegatronWorker), with all axes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/distributed/parallel_state.h"

namespace ferry::trainer {

struct MegatronGlobalInfo {
  int tp_size = 1, dp_size = 1, pp_size = 1, cp_size = 1, ep_size = 1, etp_size = 1;
  bool operator==(const MegatronGlobalInfo&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    MegatronGlobalInfo, tp_size, dp_size, pp_size, cp_size, ep_size, etp_size)

struct MegatronRankInfo {
  int tp_rank = 0, dp_rank = 0, pp_rank = 0, cp_rank = 0, ep_rank = 0, etp_rank = 0;
  bool operator==(const MegatronRankInfo&) const = default;
};

MegatronGlobalInfo get_megatron_global_info(const models::ParallelState& mesh);
MegatronRankInfo get_megatron_rank_info(const models::ParallelState& mesh);

// A role as people are told of it.
struct RoleMesh {
  std::string name{};
  std::vector<int> ranks{};  // of the world, ascending
  MegatronGlobalInfo info{};
};

// A line each, in columns: "actor      ranks 0-3  TP 2  PP 1  CP 1  EP 1  DP 2".
std::vector<std::string> describe(const std::vector<RoleMesh>& roles);

}  // namespace ferry::trainer
