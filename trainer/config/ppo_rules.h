// The rules of a run of reinforcement learning.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trainer/config/config_rules.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/section_rules.h"

namespace ferry::trainer {

// Sections of the configuration that rules and settings name.
inline const std::string kActorSection = "actor_rollout_ref.actor";
inline const std::string kRefSection = "actor_rollout_ref.ref";
inline const std::string kRolloutSection = "actor_rollout_ref.rollout";

// The cut of each role's sequences into micro-batches, and the keys that say it.
struct MicroBatchesOfRole {
  MicroBatchKeys keys{};
  std::function<MicroBatchView(const PpoConfig&)> view{};
};
std::vector<MicroBatchesOfRole> micro_batches_of_roles();

const ConfigRules<PpoConfig>& ppo_rules();

// Keys of estimators, losses and draws that others do not read.
IneffectiveKeys<PpoConfig> ineffective_in_algorithm();

// Keys that have no effect in some runs. Keys of verl's are notes: its scripts set them beside what
// switches them off.
const IneffectiveKeys<PpoConfig>& ineffective_in_ppo();

}  // namespace ferry::trainer
