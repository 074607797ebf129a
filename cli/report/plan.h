// The plan of a run, for people and for programs.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/plan/run_plan.h"

namespace ferry::cli {

// The settings that the plan chose, and the reasons for what rests on the host.
struct PlanChoice {
  std::vector<std::string> settings{};
  std::vector<std::string> offload{};
};

struct PlannedRun {
  trainer::RunSetup setup{};
  PlanChoice choice{};
  trainer::RunPlan plan{};
};

// A run with another mesh than its own.
struct PlannedMesh {
  std::vector<std::string> settings{};  // "engine.tensor_model_parallel_size=2"
  PlannedRun run{};
};
struct PlannedMeshes {
  std::vector<PlannedMesh> best{};  // that fit, those that take the fewest seconds first
  std::size_t planned = 0;
  std::size_t fit = 0;
};

std::string meshes_text(const PlannedMeshes& meshes);
nlohmann::ordered_json meshes_json(const PlannedMeshes& meshes);

std::string plan_text(const trainer::RunSetup& setup,
                      const PlanChoice& chosen,
                      const trainer::RunPlan& plan);
nlohmann::ordered_json plan_json(const trainer::RunSetup& setup,
                                 const PlanChoice& chosen,
                                 const trainer::RunPlan& plan);

}  // namespace ferry::cli
