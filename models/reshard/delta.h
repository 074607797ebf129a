// A reshard may send of each message only what changed since the last one.
#pragma once

#include <cstdint>

namespace ferry::models {

// The place of the messages that a sender keeps, as many bytes as one run sends without deltas.
enum class Delta : std::uint8_t { kOff, kOnDevice, kOnHost };

}  // namespace ferry::models
