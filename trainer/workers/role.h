// The ranks of a role, and the engine of one that learns, as the configuration says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/engine/megatron_engine.h"

namespace ferry::trainer {

// `ranks` of the world; none: all have it.
bool has_role(const std::vector<int>& ranks, int rank);
int num_ranks(const std::vector<int>& ranks, int world_size);

OffloadFlags offload_flags(const EngineConfig& config);

// The engine has optimizer, schedule and checkpoints, which lie in the run's folder under its name.
MegatronEngineOptions role_engine(MegatronEngineOptions options,
                                  const PpoConfig& config,
                                  const OptimConfig& optim,
                                  std::int64_t total_steps);

}  // namespace ferry::trainer
