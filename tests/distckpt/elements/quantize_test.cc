#include "distckpt/elements/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::distckpt {
namespace quantize_test {

// The magnitude that a code of E4M3 stands for, from its definition.
float e4m3(unsigned code) {
  const auto mantissa = static_cast<float>(code & 7U);
  const auto exponent = static_cast<int>(code >> 3U & 15U);
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0F + mantissa, exponent - 10);
}

// The value of a code of E2M1.
float e2m1(unsigned code) {
  const auto mantissa = static_cast<float>(code & 1U);
  const auto exponent = static_cast<int>(code >> 1U & 3U);
  return exponent == 0 ? mantissa / 2 : std::ldexp(2.0F + mantissa, exponent - 2);
}

// The nearest of `count` magnitudes; of two, the one of an even code, or the smaller one.
template <typename Value>
unsigned nearest(float magnitude, unsigned count, bool even, const Value& value) {
  unsigned best = 0;
  for (unsigned code = 1; code < count; ++code) {
    const auto there = std::abs(static_cast<double>(value(code)) - magnitude);
    const auto here = std::abs(static_cast<double>(value(best)) - magnitude);
    if (there < here || (there == here && even && code % 2 == 0)) best = code;
  }
  return best;
}

// Numbers of every size, many of them in the middle between two codes, zeros of either sign too.
std::vector<float> random_values(std::mt19937& random, std::size_t count, int spread) {
  std::vector<float> values(count);
  for (auto& value : values) {
    const auto mantissa = static_cast<float>(random() % 64);
    const auto exponent = static_cast<int>(random() % static_cast<unsigned>(spread));
    value = std::ldexp(mantissa, -exponent) * (random() % 2 == 0 ? 1.0F : -1.0F);
  }
  return values;
}

TEST(QuantizeE4M3, RoundsToNearestEvenByTheScaleOfTheBlock) {
  std::mt19937 random(4);
  for (int i = 0; i < 60; ++i) {
    constexpr std::int64_t kBlock = 8;
    const auto rows = static_cast<std::int64_t>(1 + random() % 20);
    const auto columns = static_cast<std::int64_t>(1 + random() % 20);
    auto values = random_values(random, static_cast<std::size_t>(rows * columns), 24);
    values.front() = 448;  // a power of two as scale, so that ties are ties
    const auto per_row = ceil_div(columns, kBlock);
    std::vector<std::byte> into(values.size());
    std::vector<float> scales(static_cast<std::size_t>(ceil_div(rows, kBlock) * per_row));
    ASSERT_EQ(quantize_e4m3(E4M3Scale::kLargest, values, columns, kBlock, into, scales),
              std::nullopt);
    std::vector<float> largest(scales.size());
    const auto block_of = [&](std::int64_t at) {
      return static_cast<std::size_t>(at / columns / kBlock * per_row + at % columns / kBlock);
    };
    for (std::int64_t at = 0; at < rows * columns; ++at) {
      auto& most = largest[block_of(at)];
      most = std::max(most, std::abs(values[static_cast<std::size_t>(at)]));
    }
    for (std::int64_t at = 0; at < rows * columns; ++at) {
      const auto value = values[static_cast<std::size_t>(at)];
      const auto most = largest[block_of(at)];
      const auto scale = most == 0 ? 1.0F : most / 448.0F;
      ASSERT_EQ(scales[block_of(at)], scale);
      const auto code = nearest(std::abs(value / scale), 127, true, e4m3);
      ASSERT_EQ(std::to_integer<unsigned>(into[static_cast<std::size_t>(at)]),
                code | (std::signbit(value) ? 128U : 0U))
          << value << " by " << scale;
    }
  }
}

TEST(QuantizeE4M3, ABlockOfZerosHasAScaleOfOne) {
  const std::vector<float> values{0.0F, -0.0F};
  std::vector<std::byte> into(2);
  std::vector<float> scales(1);
  ASSERT_EQ(quantize_e4m3(E4M3Scale::kLargest, values, 2, 128, into, scales), std::nullopt);
  EXPECT_EQ(scales[0], 1.0F);
  EXPECT_EQ(into, (std::vector{std::byte{0}, std::byte{0x80}}));
}

TEST(QuantizeE4M3, NumbersTooSmallForAScaleBecomeZeros) {
  const std::vector<float> values{std::numeric_limits<float>::denorm_min()};
  std::vector<std::byte> into(1);
  std::vector<float> scales(1);
  ASSERT_EQ(quantize_e4m3(E4M3Scale::kLargest, values, 1, 128, into, scales), std::nullopt);
  EXPECT_EQ(scales[0], 1.0F);
  EXPECT_EQ(into[0], std::byte{0});
}

TEST(QuantizeE4M3, NamesWhatIsNotFinite) {
  const std::vector<float> values{1.0F, std::numeric_limits<float>::quiet_NaN()};
  std::vector<std::byte> into(2);
  std::vector<float> scales(1);
  EXPECT_EQ(quantize_e4m3(E4M3Scale::kLargest, values, 2, 128, into, scales), 1);
}

// A block of one row, by that scale; the scale that it then has.
float requantized(const std::vector<float>& values,
                  float scale,
                  std::vector<std::byte>& codes,
                  DType scale_dtype = DType::kF32) {
  codes.resize(values.size());
  requantize_e4m3(values, std::ssize(values), {}, scale_dtype, std::span(&scale, 1), codes);
  return scale;
}

TEST(RequantizeE4M3, KeepsTheScaleAsLongAsElementsHaveNumbers) {
  std::vector<std::byte> codes;
  EXPECT_EQ(requantized({1.0F, -464.0F, 0.0F, -0.0F}, 1.0F, codes), 1.0F);
  const std::vector expected{std::byte{0x38}, std::byte{0xFE}, std::byte{0}, std::byte{0x80}};
  EXPECT_EQ(codes, expected);
}

TEST(RequantizeE4M3, ABlockThatOutgrowsItsScaleGetsThatOfItsLargest) {
  std::vector<std::byte> codes;
  constexpr float kScale = 0.75F;
  EXPECT_EQ(requantized({0.75F, 465.0F * kScale}, kScale, codes), 465.0F * kScale / 448.0F);
  EXPECT_EQ(codes[1], std::byte{0x7E});
  // bf16 has eight bits: 348.75 / 448 = 0.778 is 199.3 / 256
  EXPECT_EQ(requantized({0.75F, 465.0F * kScale}, kScale, codes, DType::kBF16), 199.0F / 256.0F);
  EXPECT_EQ(codes[1], std::byte{0x7E});
}

TEST(RequantizeE4M3, APowerOfTwoBecomesALargerOne) {
  std::vector<std::byte> codes;
  EXPECT_EQ(requantized({3.0F, 900.0F}, 1.0F, codes), 4.0F);
  EXPECT_EQ(requantized({3.0F, 896.0F}, 1.0F, codes), 2.0F);
  EXPECT_EQ(codes[1], std::byte{0x7E});
}

TEST(RequantizeE4M3, ABlockOfZerosKeepsAScaleOfZero) {
  std::vector<std::byte> codes;
  EXPECT_EQ(requantized({0.0F, -0.0F}, 0.0F, codes), 0.0F);
  EXPECT_EQ(codes, (std::vector{std::byte{0}, std::byte{0x80}}));
  EXPECT_EQ(requantized({0.0F, 448.0F}, 0.0F, codes), 1.0F);
}

// 9.2e-5 / 448 is 3.4 of the smallest numbers of fp16: three of them are too few.
TEST(RequantizeE4M3, AScaleThatIsRoundedStillHasTheLargest) {
  std::vector<std::byte> codes;
  EXPECT_EQ(requantized({9.2e-5F, 1e-6F}, 0.0F, codes, DType::kF16), std::ldexp(1.0F, -22));
  EXPECT_EQ(codes[0], std::byte{0x7C});  // 385.9 is 384
  EXPECT_EQ(requantized({1e-6F}, 0.0F, codes, DType::kF16), std::ldexp(1.0F, -24));
  EXPECT_EQ(requantized({1e-44F}, 0.0F, codes), std::numeric_limits<float>::denorm_min());
}

TEST(RequantizeE4M3, RefusesWhatIsBeyondItsScales) {
  std::vector<std::byte> codes;
  EXPECT_THROW(requantized({448.0F * 70000.0F}, 1.0F, codes, DType::kF16), Error);
}

TEST(RequantizeE4M3, ScalesBlocksOfRowsAndColumns) {
  const std::vector<float> values{1, 1, 1000, 1, 1, 1, 1, 1, 1};
  std::vector<std::byte> codes(values.size());
  std::vector<float> scales(6, 0.75F);
  requantize_e4m3(values, 3, {.rows = 1, .columns = 2}, DType::kF32, scales, codes);
  EXPECT_EQ(scales, (std::vector<float>{0.75F, 1000.0F / 448.0F, 0.75F, 0.75F, 0.75F, 0.75F}));
}

// Elements of four bits by powers of two, as MXFP4 has them, in one block.
TEST(QuantizeE4M3, KeepsEveryElementOfFourBitsWithinFifteenPowersOfTwo) {
  std::mt19937 random(6);
  constexpr std::int64_t kGroup = 32;
  for (int i = 0; i < 300; ++i) {
    const auto largest = static_cast<int>(random() % 200) - 100;
    std::vector<float> values(8 * kGroup);
    for (std::size_t group = 0; group < values.size() / kGroup; ++group) {
      const auto exponent = group == 0 ? largest : largest - static_cast<int>(random() % 15);
      for (std::size_t at = 0; at < kGroup; ++at) {
        const auto code =
            static_cast<unsigned>(group == 0 && at == 0 ? 6 + random() % 2 : random() % 8);
        values[group * kGroup + at] =
            std::ldexp(random() % 2 == 0 ? e2m1(code) : -e2m1(code), exponent);
      }
    }
    std::vector<std::byte> into(values.size());
    std::vector<float> scales(1);
    ASSERT_EQ(quantize_e4m3(E4M3Scale::kPowerOfTwo, values, kGroup, 128, into, scales),
              std::nullopt);
    ASSERT_EQ(scales[0], std::ldexp(1.0F, largest - 6));  // of DeepSeek-V4's convert.py
    for (std::size_t at = 0; at < values.size(); ++at) {
      const auto code = std::to_integer<unsigned>(into[at]);
      const auto value =
          std::copysign(e4m3(code & 127U) * scales[0], (code & 128U) != 0 ? -1.0F : 1.0F);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(value), std::bit_cast<std::uint32_t>(values[at]));
    }
  }
}

TEST(QuantizeE4M3, NamesAnElementThatWouldBeRounded) {
  std::vector<std::byte> into(3);
  std::vector<float> scales(1);
  const auto refused = [&](std::vector<float> values) {
    return quantize_e4m3(E4M3Scale::kPowerOfTwo, values, 3, 128, into, scales);
  };
  EXPECT_EQ(refused({448.0F, 1.0F, std::ldexp(1.0F, -9)}), std::nullopt);
  EXPECT_EQ(refused({448.0F, 1.0F, std::ldexp(1.0F, -10)}), 2);  // below the least of E4M3
  EXPECT_EQ(refused({448.0F, std::ldexp(3.0F, -10), 1.0F}), 1);
  EXPECT_EQ(refused({1.0625F, 1.0F, 0.0F}), 0);  // a mantissa of four bits
  EXPECT_EQ(refused({0.0F, -0.0F, 0.0F}), std::nullopt);
  EXPECT_EQ(scales[0], 1.0F);
}

TEST(QuantizeE2M1, TakesTheLeastScaleAndTheNearestCode) {
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    const auto blocks = 1 + random() % 4;
    auto values = random_values(random, 32 * blocks, 12);
    for (auto& value : values) value = std::ldexp(value, static_cast<int>(random() % 2) * 40);
    std::vector<std::byte> into(16 * blocks);
    std::vector<std::byte> exponents(blocks);
    ASSERT_EQ(quantize_e2m1(values, into, exponents), std::nullopt);
    for (std::size_t b = 0; b < blocks; ++b) {
      float largest = 0;
      for (std::size_t j = 0; j < 32; ++j)
        largest = std::max(largest, std::abs(values[b * 32 + j]));
      const auto exponent = std::to_integer<int>(exponents[b]) - 127;
      if (largest == 0) {
        ASSERT_EQ(exponent, 0);
      } else {
        ASSERT_LE(largest, std::ldexp(6.0F, exponent));
        ASSERT_GT(largest, std::ldexp(6.0F, exponent - 1));
      }
      for (std::size_t j = 0; j < 32; ++j) {
        const auto value = std::ldexp(values[b * 32 + j], -exponent);
        const auto pack = std::to_integer<unsigned>(into[(b * 32 + j) / 2]);
        const auto code = nearest(std::abs(value), 8, false, e2m1);
        ASSERT_EQ(j % 2 == 0 ? pack & 15U : pack >> 4U, code | (value < 0 ? 8U : 0U)) << value;
      }
    }
  }
}

TEST(QuantizeE2M1, TheSmallestNumbersHaveTheSmallestScale) {
  std::vector<float> values(32);
  values[3] = std::numeric_limits<float>::denorm_min();
  std::vector<std::byte> into(16);
  std::vector<std::byte> exponents(1);
  ASSERT_EQ(quantize_e2m1(values, into, exponents), std::nullopt);
  EXPECT_EQ(exponents[0], std::byte{0});
  EXPECT_EQ(into, std::vector<std::byte>(16));
}

}  // namespace quantize_test
}  // namespace ferry::distckpt
