// Deltas: a reshard may send only the elements of each message that have changed since the last
// run.
#pragma once

#include <cstdint>

namespace ferry::models {

// The place where a sender keeps its last messages. They take as many bytes as one run sends
// without deltas.
enum class Delta : std::uint8_t { kOff, kOnDevice, kOnHost };

}  // namespace ferry::models
