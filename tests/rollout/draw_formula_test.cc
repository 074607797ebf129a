#include "rollout/kernels/draw_formula.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rollout/kernels/draw_row.h"

namespace ferry::rollout {
namespace draw_formula_test {

constexpr PhiloxCounter counter(std::uint32_t a,
                                std::uint32_t b,
                                std::uint32_t c,
                                std::uint32_t d) {
  return {{a, b, c, d}};
}

void expect_same(const PhiloxCounter& got, const PhiloxCounter& expected) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.at[i], expected.at[i]) << i;
}

// The known answers of Random123 1.14, tests/kat_vectors, philox4x32 10.
TEST(Philox, HasTheKnownAnswers) {
  expect_same(philox(counter(0, 0, 0, 0), 0),
              counter(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  constexpr auto kOnes = 0xffffffffU;
  expect_same(philox(counter(kOnes, kOnes, kOnes, kOnes), ~std::uint64_t{0}),
              counter(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  expect_same(philox(counter(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344), 0x299f31d0a4093822),
              counter(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(DrawFormula, ExponentialsAndLogarithmsAreWithinTwoUlps) {
  double worst_exp = 0;
  double worst_ln = 0;
  const auto ulps = [](float got, double expected) {
    const auto nearest = static_cast<float>(expected);
    return std::abs(got - expected) /
           (std::nextafter(std::abs(nearest), INFINITY) - std::abs(nearest));
  };
  for (float x = 0; x > -64; x -= 1.37e-4F)
    worst_exp = std::max(worst_exp, ulps(exp_of_negative(x), std::exp(static_cast<double>(x))));
  for (float x = 1e-30F; x < 1e30F; x *= 1.0003F)
    worst_ln = std::max(worst_ln, ulps(ln(x), std::log(static_cast<double>(x))));
  EXPECT_LT(worst_exp, 2);
  EXPECT_LT(worst_ln, 2);
  EXPECT_EQ(exp_of_negative(0), 1);
  EXPECT_EQ(exp_of_negative(kMinusInfinity), 0);
  EXPECT_EQ(ln(1), 0);
}

TEST(DrawFormula, NoiseIsThatOfItsUniformNumber) {
  for (std::uint32_t i = 0; i < 200000; ++i) {
    const auto bits = static_cast<std::uint32_t>(philox(counter(i, 1, 2, 3), 4).at[0]) >> (i % 32);
    const double w = (static_cast<double>(bits >> 1) + 0.5) / 2147483648.0;
    const double expected = -std::log(-std::log1p(-w));
    EXPECT_NEAR(gumbel_noise(bits), expected, 2e-6 * std::max(1.0, std::abs(expected))) << bits;
  }
  EXPECT_NEAR(gumbel_noise(0xffffffff), -std::log(32 * std::log(2.0)), 1e-6);
  EXPECT_LT(-gumbel_noise(0), kMostNoise);
  EXPECT_LT(gumbel_noise(0), kMostNoise);
  EXPECT_GT(std::abs(gumbel_noise(0)), 22);
}

TEST(DrawFormula, KeysOrderByLogitThenById) {
  const float values[] = {kMinusInfinity, -3e38F, -1, -1e-40F, 0, 1e-40F, 2, 3e38F, INFINITY};
  for (std::size_t i = 0; i + 1 < std::size(values); ++i)
    EXPECT_LT(rank_key(values[i], 0), rank_key(values[i + 1], 7)) << i;
  EXPECT_GT(rank_key(1, 3), rank_key(1, 4));
  EXPECT_EQ(rank_key(usable(-0.0F), 3), rank_key(0, 3));
  EXPECT_EQ(usable(NAN), kMinusInfinity);
  for (const auto value : values) EXPECT_EQ(logit_of_key(rank_key(value, 5)), value);
  EXPECT_EQ(token_of_key(rank_key(-2, 151935)), 151935);
}

TEST(DrawFormula, ARowOfTheMostTokensDoesNotOverflow) {
  EXPECT_EQ(mass_of(0), std::uint64_t{1} << kMassBits);
  EXPECT_GT(mass_of(0) * static_cast<std::uint64_t>(kMostTokens), mass_of(0));
  EXPECT_LE(mass_of(0) * static_cast<std::uint64_t>(kMostTokens), std::uint64_t{1} << 63);
  EXPECT_EQ(mass_limit(1e-300, mass_of(0)), 1U);
  EXPECT_EQ(least_mass(1), mass_of(0));
  EXPECT_EQ(mass_of(kMinusInfinity), 0U);
}

}  // namespace draw_formula_test
}  // namespace ferry::rollout
