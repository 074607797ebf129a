// SamplingParams as a message from one process to another: all members by their names.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "rollout/schedule/sampling_params.h"

namespace ferry::rollout {

void to_json(nlohmann::json& message, const SamplingParams& params);
// Throws nlohmann::json::exception if a member is missing.
void from_json(const nlohmann::json& message, SamplingParams& params);

}  // namespace ferry::rollout
