// The parameters of one row's draw, for host and GPU.
#pragma once

#include <cstdint>

#include "rollout/kernels/draw_formula.h"

namespace ferry::rollout {

struct DrawRow {
  std::uint64_t seed = 0;
  std::uint64_t request = 0;
  std::int64_t position = 0;
  double top_p = 1;
  double min_p = 0;
  std::int32_t row = 0;    // of the logits
  std::int32_t top_k = 0;  // 0: all
  float inverse_temperature = 1;
  std::int32_t greedy = 0;
  Penalties penalties{};
  std::int32_t num_changes = 0;
  std::int64_t first_change = 0;

  // Written by a GPU's thread blocks: the best key so far, and how many blocks are done.
  std::uint64_t best = 0;
  std::uint32_t arrived = 0;
};

// A token whose logit differs from the model's.
struct LogitChange {
  static constexpr std::int32_t kForbidden = -1;

  std::int32_t token = 0;
  std::int32_t count = 0;  // occurrences in the answer (0: in the prompt alone), or kForbidden

  constexpr float operator()(float logit, const Penalties& penalties) const {
    return count == kForbidden ? kMinusInfinity : penalized(logit, penalties, count);
  }
};

}  // namespace ferry::rollout
