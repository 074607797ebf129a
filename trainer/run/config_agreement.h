// The configurations of a run's ranks, compared before one of them waits for another in vain: they
// have to be alike, also in what was chosen for "auto".
#pragma once

#include "models/distributed/world.h"
#include "trainer/config/config_value.h"

namespace ferry::trainer {

// Throws Error(kUsage) on all ranks unless all have the same values: the first key that differs,
// and its values. Called by all.
void require_agreement(const ConfigValues& mine, models::World& world);

}  // namespace ferry::trainer
