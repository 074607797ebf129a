// The rules of a run of reinforcement learning.
#pragma once

#include <string>

#include "trainer/config/config_rules.h"
#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

// Sections of the configuration that rules and settings name.
inline const std::string kActorSection = "actor_rollout_ref.actor";
inline const std::string kRefSection = "actor_rollout_ref.ref";
inline const std::string kRolloutSection = "actor_rollout_ref.rollout";

const ConfigRules<PpoConfig>& ppo_rules();

}  // namespace ferry::trainer
