// A session as a packet to another process, and back; numbers keep their bits.
#pragma once

#include <nlohmann/json.hpp>

#include "rollout/schedule/sampling_params.h"
#include "trainer/agents/session.h"

namespace ferry::trainer {

nlohmann::json to_packet(const Session& session);
Session session_of(const nlohmann::json& packet);

// The parameters that sessions are drawn by.
nlohmann::json to_packet(const rollout::SamplingParams& params);
rollout::SamplingParams params_of(const nlohmann::json& packet);

}  // namespace ferry::trainer
