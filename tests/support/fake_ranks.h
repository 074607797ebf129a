// Ranks as threads of the test.
#pragma once

#include <functional>

#include "distckpt/plan/rank_group.h"

namespace ferry::support {

// Runs `body` as each of `size` ranks. Throws what the first rank that threw something other than
// Error(kCancelled) threw, else what any threw.
void run_as_ranks(int size, const std::function<void(const distckpt::RankGroup&)>& body);

}  // namespace ferry::support
