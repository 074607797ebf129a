// The rules of a run of reinforcement learning.
#pragma once

#include "trainer/config/config_rules.h"
#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

const ConfigRules<PpoConfig>& ppo_rules();

}  // namespace ferry::trainer
