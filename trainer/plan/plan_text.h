// The plan of a run for people: what `ferry plan` prints before it, and the run when it begins.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trainer/plan/run_plan.h"

namespace ferry::trainer {

// The settings that the plan chose, and the reasons for what rests on the host.
struct PlanChoice {
  std::vector<std::string> settings{};
  std::vector<std::string> offload{};
};

struct PlannedRun {
  RunSetup setup{};
  PlanChoice choice{};
  RunPlan plan{};
};

// Parts of what lies on a device.
inline constexpr auto kDeviceParts =
    std::to_array<std::pair<std::string_view, std::int64_t PhaseBytes::*>>(
        {{"weights", &PhaseBytes::weights},
         {"gradients", &PhaseBytes::gradients},
         {"optimizer", &PhaseBytes::optimizer},
         {"kv_cache", &PhaseBytes::kv_cache},
         {"activations", &PhaseBytes::activations},
         {"logits", &PhaseBytes::logits},
         {"staging", &PhaseBytes::staging},
         {"context", &PhaseBytes::context},
         {"replicas", &PhaseBytes::replicas}});

double tokens_per_second(const PlannedRun& run);  // of each device
std::string rate_text(const PlannedRun& run);     // "23.43 s, 5790 tokens/s on each device"

// "TP 2  PP 1  CP 1  EP 1  DP 2"
std::string mesh_text(const models::MeshShape& mesh);

// Lines: device, meshes, a step, what was chosen; for each group of ranks that have the same to do
// a table of phases; the seconds. There are tables for `most_groups` at most, those with the
// fullest devices, in their order, and a line that says how many are left out.
std::string plan_text(const PlannedRun& run,
                      std::size_t most_groups = std::numeric_limits<std::size_t>::max());

}  // namespace ferry::trainer
