// Training that does not wait for the rollout, under the names of verl's fully_async_policy: its
// section, and when such a run is possible. ppo/rollout_loop.h says what it does.
#pragma once

#include "trainer/config/config_rules.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {

struct PpoConfig;
struct ReplicaConfig;

struct AsyncTrainingConfig {            // async_training
  double staleness_threshold = 0;       // of the batches between two transfers of weights
  int trigger_parameter_sync_step = 1;  // steps between two transfers
  bool partial_rollout = false;         // answers go on with newer weights
  bool operator==(const AsyncTrainingConfig&) const = default;
};

void list(ConfigTable& table, AsyncTrainingConfig& c);
void list(ConfigTable& table, ReplicaConfig& c);
ConfigRules<PpoConfig> async_rules();

}  // namespace ferry::trainer
