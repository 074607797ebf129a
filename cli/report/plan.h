// The plan of a run, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/plan/run_plan.h"

namespace ferry::cli {

// `chosen`: settings that the configuration leaves to the plan.
std::string plan_text(const trainer::RunSetup& setup,
                      const std::vector<std::string>& chosen,
                      const trainer::RunPlan& plan);
nlohmann::ordered_json plan_json(const trainer::RunSetup& setup,
                                 const std::vector<std::string>& chosen,
                                 const trainer::RunPlan& plan);

}  // namespace ferry::cli
