#include "distckpt/elements/arithmetic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "distckpt/elements/cast.h"
#include "tests/support/naive_cast.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace arithmetic_test {

TEST(Arithmetic, RoundsTheSumOnce) {
  support::Random random(3);
  for (const auto dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    const auto size = static_cast<std::size_t>(size_of(dtype));
    for (int i = 0; i < 2000; ++i) {
      std::vector<std::byte> element(size);
      support::naive_round(static_cast<double>(random.between(-100'000, 100'000)) / 30'000, dtype,
                           element.data());
      const auto value = element_value(dtype, element.data());
      for (const int number : {-1, 1}) {
        auto moved = element;
        add_number(dtype, moved, number);
        std::vector<std::byte> expected(size);  // the sum is exact in fp64
        support::naive_round(value + number, dtype, expected.data());
        ASSERT_EQ(moved, expected) << short_name(dtype) << " " << value << " + " << number;
      }
    }
  }
}

// Weights of bf16 come back from Megatron-Core's zero-centred norms, but for some that are less
// than a half.
TEST(Arithmetic, LosesBitsOfSmallWeightsAlone) {
  int lost = 0;
  for (std::uint32_t bits = 0x3E00; bits < 0x4100; ++bits) {  // 0.125 to 8
    std::vector<std::byte> element(2);
    std::memcpy(element.data(), &bits, 2);
    auto back = element;
    add_number(DType::kBF16, back, -1);
    add_number(DType::kBF16, back, 1);
    if (back == element) continue;
    ++lost;
    EXPECT_LT(element_value(DType::kBF16, element.data()), 0.5);
  }
  EXPECT_GT(lost, 64);
}

TEST(Arithmetic, LeavesNanANan) {
  std::vector<std::byte> element(4);
  const auto nan = std::nanf("");
  std::memcpy(element.data(), &nan, 4);
  add_number(DType::kF32, element, 1);
  EXPECT_TRUE(std::isnan(element_value(DType::kF32, element.data())));
}

TEST(Arithmetic, GivesTheBytesBackWhereTheyAreCombinedTwice) {
  support::Random random(5);
  std::vector<std::byte> bytes(1003);
  std::vector<std::byte> other(bytes.size());
  for (auto& byte : bytes) byte = static_cast<std::byte>(random.between(0, 255));
  for (auto& byte : other) byte = static_cast<std::byte>(random.between(0, 255));
  auto combined = bytes;
  exclusive_or(combined, other);
  EXPECT_EQ(combined[7], bytes[7] ^ other[7]);
  EXPECT_NE(combined, bytes);
  exclusive_or(combined, other);
  EXPECT_EQ(combined, bytes);
}

}  // namespace arithmetic_test
}  // namespace ferry::distckpt
