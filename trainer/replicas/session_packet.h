// A session as a packet to another process, and back; numbers keep their bits.
#pragma once

#include <nlohmann/json.hpp>

#include "trainer/agents/session.h"

namespace ferry::trainer {

nlohmann::json to_packet(const Session& session);
Session session_of(const nlohmann::json& packet);

}  // namespace ferry::trainer
