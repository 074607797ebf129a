// The tokens that best_token() does not compute the noise of never had a chance.
#include "rollout/kernels/best_token.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace ferry::rollout {
namespace best_token_test {

float noise_of(const DrawRow& draw, std::int64_t token) {
  const auto quad = static_cast<std::uint32_t>(token / 4);
  return gumbel_noise(
      philox(draw_counter(draw.request, draw.position, quad), draw.seed).at[token % 4]);
}

// The best of all tokens, with the noise of each computed by itself.
BestToken plainly(const DrawRow& draw, const std::vector<float>& logits, float scale) {
  BestToken best;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const auto token = static_cast<std::int64_t>(i);
    const float z = usable(logits[i]) * scale;
    best.offer(draw.greedy != 0 ? z : z + noise_of(draw, token), token);
  }
  return best;
}

void expect_same(const BestToken& got, const BestToken& expected) {
  EXPECT_EQ(got.token, expected.token);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(got.sum), std::bit_cast<std::uint32_t>(expected.sum));
}

struct Shape {
  const char* name;
  float spread;
  float offset;
  float peak;  // that one token has more
};

TEST(BestToken, IsThatOfAllTokensWithTheirNoise) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::mt19937_64 random(1);
  for (const auto& shape :
       {Shape{"flat", 0, 0, 0}, Shape{"narrow", 0.02F, 0, 0}, Shape{"wide", 8, 0, 0},
        Shape{"peaked", 3, 0, 18}, Shape{"far", 1e3F, -5e4F, 0}, Shape{"large", 1, 1e7F, 0}})
    for (const std::size_t size : {1U, 63U, 64U, 1000U, 20011U})
      for (int repeat = 0; repeat < 20; ++repeat) {
        SCOPED_TRACE(std::string(shape.name) + " " + std::to_string(size));
        std::normal_distribution<float> noise(0, std::max(shape.spread, 1e-30F));
        std::vector<float> logits(size);
        std::vector<std::uint16_t> halves(size);
        for (auto& one : logits) one = shape.offset + noise(random);
        logits[random() % size] += shape.peak;
        if (repeat % 4 == 1) logits[random() % size] = -kInfinity;
        if (repeat % 4 == 2) logits[random() % size] = std::numeric_limits<float>::quiet_NaN();
        if (repeat % 4 == 3) std::fill_n(logits.begin(), size / 2, -kInfinity);
        for (std::size_t i = 0; i < size; ++i) {
          halves[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(logits[i]) >> 16);
          logits[i] = std::bit_cast<float>(std::uint32_t{halves[i]} << 16);
        }
        const DrawRow draw{.seed = random(),
                           .request = random(),
                           .position = repeat,
                           .greedy = repeat % 10 == 9 ? 1 : 0};
        const auto end = static_cast<std::int64_t>(size);
        for (const float scale : {1.0F, 1.7F}) {
          const auto expected = plainly(draw, logits, scale);
          expect_same(best_token(draw, logits.data(), scale, 0, end), expected);
          expect_same(best_token(draw, halves.data(), scale, 0, end), expected);
          BestToken of_parts;
          for (std::int64_t first = 0; first < end; first += 5 * kTokenChunk) {
            const auto part = best_token(draw, halves.data(), scale, first,
                                         std::min(end, first + 5 * kTokenChunk));
            of_parts.offer(part.sum, part.token);
          }
          expect_same(of_parts, expected);
        }
      }
}

}  // namespace best_token_test
}  // namespace ferry::rollout
