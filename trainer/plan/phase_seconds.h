// The seconds of each phase of a step: floating-point operations and bytes, at the device's rates
// and the shares of them that runs reach.
#pragma once

#include <vector>

#include "trainer/plan/run_plan.h"

namespace ferry::trainer {

// Phases in which files are written have no seconds.
std::vector<PhaseSeconds> phase_seconds(const RunSetup& setup, const std::vector<Phase>& phases);

}  // namespace ferry::trainer
