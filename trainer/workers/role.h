// Which ranks have a role, and the engine of one that learns, as the configuration says.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/megatron_engine.h"

namespace ferry::trainer {

// `ranks` of the world; none: all have it.
bool has_role(const std::vector<int>& ranks, int rank);

OffloadFlags offload_flags(const EngineConfig& config);

// Tokens of a micro-batch that nobody said: 16384 (verl's ppo_max_token_len_per_gpu), or the longest
// sequence that data allow on `cp` ranks.
int max_token_len_per_gpu(const PpoDataConfig& data, int cp);

// With its optimizer, schedule and checkpoints, which lie in the run's folder under its name.
MegatronEngineOptions role_engine(MegatronEngineOptions options,
                                  const PpoConfig& config,
                                  const OptimConfig& optim,
                                  std::int64_t total_steps);

}  // namespace ferry::trainer
