// The plan of a run, made in its first moments, before anything is loaded.
#pragma once

#include <functional>
#include <string>

#include "converter/open/checkpoint.h"
#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/sft_config.h"

namespace ferry::trainer {

inline constexpr const char* kPlanFile = "plan.txt";  // in a run's folder

template <typename Config>
struct Planned {
  Config config{};     // with what it leaves to the plan filled in, the same on all ranks
  std::string text{};  // of the plan, for people
};

// Plans the run. Rank 0 says, a line at a time, what was chosen and what the run will take: of its
// ranks those with the fullest devices. Called by all ranks; `origin` is the actor's checkpoint.
// Throw Error(kUsage) for a mesh that does not fill its ranks, or that a model cannot be split
// over, OutOfMemory where the ranks of a host would pin more memory than it has.
Planned<SftConfig> planned(const SftConfig& config,
                           const converter::Checkpoint& origin,
                           models::World& world,
                           const std::function<void(const std::string&)>& say);
Planned<PpoConfig> planned(const PpoConfig& config,
                           const converter::Checkpoint& origin,
                           models::World& world,
                           const std::function<void(const std::string&)>& say);

}  // namespace ferry::trainer
