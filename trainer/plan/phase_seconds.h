// The seconds of each phase of a step: floating-point operations and bytes, at the device's rates
// and the shares of them that runs reach.
#pragma once

#include <vector>

#include "trainer/plan/run_plan.h"

namespace ferry::trainer {

// Shares of a device's peak, as measured: docs/training/planning.md says on what.
struct Efficiency {
  double learning = 0;    // forward and backward, of floating-point operations
  double forward = 0;     // forward alone
  double generation = 0;  // of models/spec/roofline.h
};
Efficiency efficiency_of(const models::TransformerConfig& model, const models::MeshShape& mesh);

// Phases in which files are written have no seconds.
std::vector<PhaseSeconds> phase_seconds(const RunSetup& setup, const std::vector<Phase>& phases);

}  // namespace ferry::trainer
