#include "distckpt/elements/dequantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "distckpt/elements/cast.h"

namespace ferry::distckpt {
namespace dequantize_test {

// The value of an E4M3 number, from its definition: 4 bits of exponent (bias 7), 3 of mantissa.
float e4m3(std::uint8_t bits) {
  const float sign = (bits & 0x80) != 0 ? -1.0F : 1.0F;
  const int exponent = bits >> 3 & 0xF;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(1.0F + static_cast<float>(mantissa) / 8, exponent - 7);
}

TEST(Dequantize, MultipliesEachElementByTheScaleOfItsBlock) {
  constexpr std::int64_t kRows = 37;
  constexpr std::int64_t kColumns = 53;
  const Dims block{8, 16};
  std::mt19937 random(1);
  std::vector<std::byte> weight(kRows * kColumns);
  for (auto& element : weight) element = static_cast<std::byte>(random());
  const Dims blocks{(kRows + 7) / 8, (kColumns + 15) / 16};
  std::vector<float> scales(static_cast<std::size_t>(blocks.product()));
  for (auto& scale : scales)
    scale = std::ldexp(1.0F + static_cast<float>(random() % 1000) / 999,
                       static_cast<int>(random() % 9) - 6);

  // Any box of the weight, also one that begins and ends inside of blocks.
  for (int i = 0; i < 200; ++i) {
    const auto draw = [&](std::int64_t size) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(size));
    };
    Box box{.offset = {draw(kRows), draw(kColumns)}, .size = {}};
    box.size = {1 + draw(kRows - box.offset[0]), 1 + draw(kColumns - box.offset[1])};
    const auto part = scales_of(box, block);
    std::vector<float> part_scales;
    for (auto r = part.offset[0]; r < part.end(0); ++r) {
      for (auto c = part.offset[1]; c < part.end(1); ++c)
        part_scales.push_back(scales[static_cast<std::size_t>(r * blocks[1] + c)]);
    }
    std::vector<std::byte> packed;
    for (auto r = box.offset[0]; r < box.end(0); ++r) {
      for (auto c = box.offset[1]; c < box.end(1); ++c)
        packed.push_back(weight[static_cast<std::size_t>(r * kColumns + c)]);
    }
    std::vector<float> found(packed.size());
    ASSERT_EQ(dequantize(box, Encoding::kE4M3, packed,
                         {.dtype = DType::kF32,
                          .block = block,
                          .box = part,
                          .packed = std::as_bytes(std::span(part_scales))},
                         DType::kF32, std::as_writable_bytes(std::span(found))),
              std::nullopt);
    std::size_t at = 0;
    for (auto r = box.offset[0]; r < box.end(0); ++r) {
      for (auto c = box.offset[1]; c < box.end(1); ++c, ++at) {
        const float expected = e4m3(std::to_integer<std::uint8_t>(
                                   weight[static_cast<std::size_t>(r * kColumns + c)])) *
                               scales[static_cast<std::size_t>(r / 8 * blocks[1] + c / 16)];
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(found[at]));
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(found[at]), std::bit_cast<std::uint32_t>(expected))
              << r << "," << c;
        }
      }
    }
  }
}

TEST(Dequantize, RefusesAFiniteProductThatOverflows) {
  const Box box{.offset = {0, 0}, .size = {1, 2}};
  const std::vector<std::byte> weight{std::byte{0x08}, std::byte{0x7E}};  // 2^-6 and 448
  const float scale = 1000;
  std::vector<std::byte> into(4);
  EXPECT_EQ(dequantize(box, Encoding::kE4M3, weight,
                       {.dtype = DType::kF32,
                        .block = {128, 128},
                        .box = {.offset = {0, 0}, .size = {1, 1}},
                        .packed = std::as_bytes(std::span(&scale, 1))},
                       DType::kF16, into),
            1);
}

// The value of an E2M1 number, from its definition: 2 bits of exponent (bias 1), 1 of mantissa.
float e2m1(unsigned bits) {
  const float sign = (bits & 8) != 0 ? -1.0F : 1.0F;
  const int exponent = static_cast<int>(bits >> 1 & 3);
  const auto mantissa = static_cast<float>(bits & 1);
  return sign * (exponent == 0 ? mantissa / 2 : std::ldexp(1.0F + mantissa / 2, exponent - 1));
}

TEST(Dequantize, UnpacksPairsOfFourBitsTheLowerFirstInBlocksOfAnyRank) {
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    const auto draw = [&](std::int64_t from, std::int64_t to) {
      return from + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
    };
    const Dims block{1, draw(1, 3), 2 * draw(1, 4)};
    Box box{.offset = {draw(0, 3), draw(0, 5), 2 * draw(0, 9)},
            .size = {draw(1, 3), draw(1, 5), 2 * draw(1, 9)}};
    std::vector<std::byte> packs(static_cast<std::size_t>(box.volume() / 2));
    for (auto& pack : packs) pack = static_cast<std::byte>(random());
    const auto part = scales_of(box, block);
    std::vector<std::byte> exponents(static_cast<std::size_t>(part.volume()));
    for (auto& exponent : exponents) exponent = static_cast<std::byte>(draw(0, 255));
    std::vector<float> found(static_cast<std::size_t>(box.volume()));
    ASSERT_EQ(dequantize(box, Encoding::kE2M1, packs,
                         {.dtype = DType::kU8, .block = block, .box = part, .packed = exponents},
                         DType::kF32, std::as_writable_bytes(std::span(found))),
              std::nullopt);
    std::size_t at = 0;
    for (auto a = box.offset[0]; a < box.end(0); ++a) {
      for (auto b = box.offset[1]; b < box.end(1); ++b) {
        for (auto c = box.offset[2]; c < box.end(2); ++c, ++at) {
          const auto pack = std::to_integer<unsigned>(packs[at / 2]);
          const auto place =
              ((a - part.offset[0]) * part.size[1] + b / block[1] - part.offset[1]) * part.size[2] +
              c / block[2] - part.offset[2];
          const auto exponent =
              std::to_integer<int>(exponents[static_cast<std::size_t>(place)]) - 127;
          const float expected = std::ldexp(e2m1(at % 2 == 0 ? pack & 15U : pack >> 4U), exponent);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(found[at]), std::bit_cast<std::uint32_t>(expected))
              << exponent;
        }
      }
    }
  }
}

}  // namespace dequantize_test
}  // namespace ferry::distckpt
