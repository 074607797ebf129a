// The models of a run, by what they are for (verl's Role).
#pragma once

#include <array>
#include <cstdint>

#include "trainer/config/choice.h"

namespace ferry::trainer {

enum class Role : std::uint8_t { kActor, kRef, kCritic, kReward };

// Names of their folders, metrics and groups of ranks.
template <>
inline constexpr auto kChoices<Role> = std::to_array<Named<Role>>({{"actor", Role::kActor},
                                                                   {"ref", Role::kRef},
                                                                   {"critic", Role::kCritic},
                                                                   {"reward", Role::kReward}});

}  // namespace ferry::trainer
