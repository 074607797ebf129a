// The step behind which a run of PPO begins: the newest one that all of its roles have saved, in
// its own folder or in that of another run, or one that is named.
#pragma once

#include <cstdint>
#include <filesystem>

#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

struct PpoStart {
  std::int64_t step = 0;        // behind it; 0: from nothing
  std::filesystem::path run{};  // whose checkpoints these are, if another's than this run's
};

// Finds the start that config.checkpoint names. Throws Error(kNotFound) where what it names is not
// there, Error(kUsage) if the run would write over what its folder has.
PpoStart ppo_start(const PpoConfig& config);

}  // namespace ferry::trainer
