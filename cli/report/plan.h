// The plan of a run, for people and for programs.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/plan/plan_text.h"

namespace ferry::cli {

// A run with another mesh than its own.
struct PlannedMesh {
  std::vector<std::string> settings{};  // "engine.tensor_model_parallel_size=2"
  trainer::PlannedRun run{};
};
struct PlannedMeshes {
  std::vector<PlannedMesh> best{};  // that fit, those that take the fewest seconds first
  std::size_t planned = 0;
  std::size_t fit = 0;
};

std::string meshes_text(const PlannedMeshes& meshes);
nlohmann::ordered_json meshes_json(const PlannedMeshes& meshes);

nlohmann::ordered_json plan_json(const trainer::PlannedRun& run);

}  // namespace ferry::cli
