// The group of all ranks of a run, for what they exchange once.
#pragma once

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/distributed/world.h"

namespace ferry::trainer {

// `name` as ProcessGroup has it. Called by all.
inline models::ProcessGroup all_ranks(models::World& world, const std::string& name) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return {world, name, std::move(ranks)};
}

}  // namespace ferry::trainer
