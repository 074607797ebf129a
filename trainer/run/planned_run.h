// The plan of a run, made in its first moments, before anything is loaded.
#pragma once

#include <functional>
#include <string>

#include "converter/open/checkpoint.h"
#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/sft_config.h"

namespace ferry::trainer {

// The configuration with what it leaves to the plan filled in, the same on all ranks. Rank 0 says,
// a line at a time, what was chosen and, on GPUs, what the run will take. Called by all ranks;
// `origin` is the actor's checkpoint. Throw Error(kUsage) for a mesh that does not fill its ranks,
// or that a model cannot be split over, OutOfMemory where the ranks of a host would pin more memory
// than it has.
SftConfig planned(const SftConfig& config,
                  const converter::Checkpoint& origin,
                  models::World& world,
                  const std::function<void(const std::string&)>& say);
PpoConfig planned(const PpoConfig& config,
                  const converter::Checkpoint& origin,
                  models::World& world,
                  const std::function<void(const std::string&)>& say);

}  // namespace ferry::trainer
