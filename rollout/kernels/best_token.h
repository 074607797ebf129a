// Gumbel-max over a part of a row on the host: the token with the largest sum of logit and noise.
// Noise is computed only if the random bits allow it to exceed the best sum so far.
#pragma once

#include <cstdint>

#include "rollout/kernels/draw_row.h"

namespace ferry::rollout {

struct BestToken {
  float sum = kMinusInfinity;
  std::int64_t token = -1;

  // Called in ascending order of ids: the first of equal sums stays.
  void offer(float its_sum, std::int64_t its_token) {
    if (token >= 0 && !(its_sum > sum)) return;
    sum = its_sum;
    token = its_token;
  }
};

// `first` below is a multiple of it.
inline constexpr std::int64_t kTokenChunk = 64;

// The best of the tokens first .. end - 1, with z = usable(logit) * scale. logits [vocab_size]:
// fp32, or the bits of bf16.
BestToken best_token(
    const DrawRow& draw, const float* logits, float scale, std::int64_t first, std::int64_t end);
BestToken best_token(const DrawRow& draw,
                     const std::uint16_t* logits,
                     float scale,
                     std::int64_t first,
                     std::int64_t end);

}  // namespace ferry::rollout
