// The plan of a run, for people and for programs.
#pragma once

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

std::string plan_text(const trainer::RunSetup& setup,
                      const PlanChoice& chosen,
                      const trainer::RunPlan& plan);
nlohmann::ordered_json plan_json(const trainer::RunSetup& setup,
                                 const PlanChoice& chosen,
                                 const trainer::RunPlan& plan);

}  // namespace ferry::cli
