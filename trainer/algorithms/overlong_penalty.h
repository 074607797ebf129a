// DAPO's soft punishment of answers that come near the limit (arXiv:2503.14476, 3.4; verl
// experimental/reward_loop/reward_manager/dapo.py).
#pragma once

#include <cstdint>

namespace ferry::trainer {

struct OverlongBuffer {  // reward.reward_kwargs
  std::int64_t max_resp_len = 0;
  std::int64_t len = 0;  // the last so many tokens below max_resp_len are punished
  double penalty_factor = 1;
};

// min(-(response_length - (max_resp_len - len)) / len x penalty_factor, 0), to be added to the
// score. Throws Error(kUsage) for a buffer that is empty, or longer than the response may be.
double overlong_penalty(std::int64_t response_length, const OverlongBuffer& buffer);

}  // namespace ferry::trainer
