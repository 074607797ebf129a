// DAPO's soft punishment of answers that come near the limit (arXiv:2503.14476, 3.4; verl
// experimental/reward_loop/reward_manager/dapo.py).
#pragma once

#include <cstdint>

#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

// The last `len` tokens below max_resp_len are punished:
// min(-(response_length - (max_resp_len - len)) / len x penalty_factor, 0), to be added to the
// score. Throws Error(kUsage) for a buffer that is empty, or longer than the response may be.
double overlong_penalty(std::int64_t response_length,
                        std::int64_t max_resp_len,
                        const OverlongBufferConfig& buffer);

}  // namespace ferry::trainer
