#include "distckpt/elements/cast.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/naive_cast.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace cast_test {

using support::fails;
using support::naive_round;
using support::naive_value;
using support::Random;

constexpr auto kInfinity = std::numeric_limits<float>::infinity();
constexpr std::array kFloats{DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

template <typename T>
T load(const std::vector<std::byte>& bytes, std::size_t index = 0) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

std::vector<std::byte> room_for(DType dtype, std::size_t count) {
  return std::vector<std::byte>(count * static_cast<std::size_t>(size_of(dtype)));
}

// Every element there is of a 16-bit dtype.
std::vector<std::byte> all_16_bit() {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return bytes_of(all);
}

std::uint16_t narrow(float value, DType dtype) {
  auto result = room_for(dtype, 1);
  EXPECT_EQ(cast(DType::kF32, bytes_of<float>({value}), dtype, result, CastRule::kRound),
            std::nullopt);
  return load<std::uint16_t>(result);
}

// --- All 16-bit patterns ---

class CastOf16Bits : public testing::TestWithParam<DType> {};

TEST_P(CastOf16Bits, WidensEveryPatternToItsValue) {
  const auto all = all_16_bit();
  for (const auto wide : {DType::kF32, DType::kF64}) {
    auto widened = room_for(wide, 65536);
    ASSERT_EQ(cast(GetParam(), all, wide, widened, CastRule::kRound), std::nullopt);
    for (std::size_t i = 0; i < 65536; ++i) {
      const auto expected = naive_value(GetParam(), all.data() + 2 * i);
      const auto found =
          naive_value(wide, widened.data() + i * static_cast<std::size_t>(size_of(wide)));
      ASSERT_EQ(std::isnan(expected), std::isnan(found)) << "pattern " << i;
      ASSERT_EQ(std::signbit(expected), std::signbit(found)) << "pattern " << i;
      if (!std::isnan(expected)) {
        ASSERT_EQ(expected, found) << "pattern " << i;
      }
      ASSERT_TRUE(std::isnan(expected) ||
                  element_value(GetParam(), all.data() + 2 * i) == expected);
    }
  }
}

TEST_P(CastOf16Bits, ComesBackFromFp32BitForBitEvenIfNan) {
  const auto all = all_16_bit();
  auto widened = room_for(DType::kF32, 65536);
  auto back = room_for(GetParam(), 65536);
  ASSERT_EQ(cast(GetParam(), all, DType::kF32, widened, CastRule::kExact), std::nullopt);
  ASSERT_EQ(cast(DType::kF32, widened, GetParam(), back, CastRule::kExact), std::nullopt);
  EXPECT_TRUE(support::same_bytes(all, back));
}

// fp64 makes a signalling NaN quiet, as the processor does.
TEST_P(CastOf16Bits, ComesBackFromFp64BitForBitButForSignallingNans) {
  const auto all = all_16_bit();
  const std::uint16_t quiet = GetParam() == DType::kF16 ? 0x0200 : 0x0040;
  auto widened = room_for(DType::kF64, 65536);
  auto back = room_for(GetParam(), 65536);
  ASSERT_EQ(cast(GetParam(), all, DType::kF64, widened, CastRule::kRound), std::nullopt);
  ASSERT_EQ(cast(DType::kF64, widened, GetParam(), back, CastRule::kExact), std::nullopt);
  for (std::size_t i = 0; i < 65536; ++i) {
    const bool nan = std::isnan(naive_value(GetParam(), all.data() + 2 * i));
    ASSERT_EQ(load<std::uint16_t>(back, i), nan ? i | quiet : i) << "pattern " << i;
  }
}

TEST_P(CastOf16Bits, RoundsEveryTieToEven) {
  const auto dtype = GetParam();
  for (std::uint32_t i = 0; i < 0x7FFF; ++i) {
    const auto low = static_cast<std::uint16_t>(i);
    const auto high = static_cast<std::uint16_t>(i + 1);
    const auto a = naive_value(dtype, bytes_of<std::uint16_t>({low}).data());
    const auto b = naive_value(dtype, bytes_of<std::uint16_t>({high}).data());
    if (!std::isfinite(a) || !std::isfinite(b)) continue;
    const auto tie = static_cast<float>(a + (b - a) / 2);  // exact: both have bits to spare
    const auto even = static_cast<std::uint16_t>(i % 2 == 0 ? low : high);
    ASSERT_EQ(narrow(tie, dtype), even) << "between " << low << " and " << high;
    ASSERT_EQ(narrow(std::nextafter(tie, 0.0F), dtype), low);
    ASSERT_EQ(narrow(std::nextafter(tie, kInfinity), dtype), high);
    ASSERT_EQ(narrow(-tie, dtype), even | 0x8000);
  }
}

TEST_P(CastOf16Bits, RoundsRandomNumbersAsTheReferenceDoes) {
  Random random(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    std::array<std::byte, 2> expected{};
    naive_round(value, GetParam(), expected.data());
    const bool overflows =
        std::isinf(naive_value(GetParam(), expected.data())) && std::isfinite(value);
    auto found = room_for(GetParam(), 1);
    const auto refused =
        cast(DType::kF32, bytes_of<float>({value}), GetParam(), found, CastRule::kRound);
    ASSERT_EQ(refused.has_value(), overflows) << value;
    if (overflows || std::isnan(value)) continue;
    ASSERT_TRUE(support::same_bytes(expected, found)) << value;
  }
}

std::string name_of(const testing::TestParamInfo<DType>& info) {
  return std::string(short_name(info.param));
}

INSTANTIATE_TEST_SUITE_P(, CastOf16Bits, testing::Values(DType::kF16, DType::kBF16), name_of);

// --- Single values ---

TEST(Cast, Bf16KnownValues) {
  EXPECT_EQ(narrow(1.0F, DType::kBF16), 0x3F80);
  EXPECT_EQ(narrow(-0.0F, DType::kBF16), 0x8000);
  EXPECT_EQ(narrow(0x1p-133F, DType::kBF16), 0x0001);  // its smallest subnormal
  EXPECT_EQ(narrow(0x1p-134F, DType::kBF16), 0x0000);  // half of it: a tie, to even
  EXPECT_EQ(narrow(std::nextafter(0x1p-134F, 1.0F), DType::kBF16), 0x0001);
  EXPECT_EQ(narrow(0x1.FEp127F, DType::kBF16), 0x7F7F);  // its largest
  EXPECT_EQ(narrow(kInfinity, DType::kBF16), 0x7F80);
  EXPECT_EQ(narrow(-kInfinity, DType::kBF16), 0xFF80);
  EXPECT_EQ(narrow(std::bit_cast<float>(0x7F800001U), DType::kBF16), 0x7FC0);
  EXPECT_EQ(narrow(std::bit_cast<float>(0xFFFFFFFFU), DType::kBF16), 0xFFFF);
}

TEST(Cast, Fp16KnownValues) {
  EXPECT_EQ(narrow(1.0F, DType::kF16), 0x3C00);
  EXPECT_EQ(narrow(65504.0F, DType::kF16), 0x7BFF);
  EXPECT_EQ(narrow(65519.996F, DType::kF16), 0x7BFF);
  EXPECT_EQ(narrow(0x1p-24F, DType::kF16), 0x0001);
  EXPECT_EQ(narrow(0x1p-25F, DType::kF16), 0x0000);
  EXPECT_EQ(narrow(0x1.000002p-25F, DType::kF16), 0x0001);
  EXPECT_EQ(narrow(0x1p-14F, DType::kF16), 0x0400);
  EXPECT_EQ(narrow(std::nextafter(0x1p-14F, 0.0F), DType::kF16), 0x0400);
  EXPECT_EQ(narrow(std::bit_cast<float>(0x7F800001U), DType::kF16), 0x7E00);
  EXPECT_EQ(narrow(std::bit_cast<float>(0xFF812345U), DType::kF16), 0xFC09);
}

TEST(Cast, RefusesToTurnAFiniteValueIntoInfinity) {
  const auto f32_max = std::numeric_limits<float>::max();
  auto two = room_for(DType::kF16, 3);
  EXPECT_EQ(cast(DType::kF32, bytes_of<float>({1, 2, 65520}), DType::kF16, two, CastRule::kRound),
            2);
  EXPECT_EQ(
      cast(DType::kF32, bytes_of<float>({1, f32_max, 3}), DType::kBF16, two, CastRule::kRound), 1);
  auto four = room_for(DType::kF32, 1);
  EXPECT_EQ(cast(DType::kF64, bytes_of<double>({1e39}), DType::kF32, four, CastRule::kRound), 0);
  EXPECT_EQ(cast(DType::kF64, bytes_of<double>({-1e39}), DType::kF32, four, CastRule::kExact), 0);
}

TEST(Cast, ExactRefusesTheFirstValueThatWouldChange) {
  auto two = room_for(DType::kBF16, 4);
  EXPECT_EQ(cast(DType::kF32, bytes_of<float>({1, 0.5, 1.00390625, 3}), DType::kBF16, two,
                 CastRule::kExact),
            2);
  EXPECT_EQ(cast(DType::kF32, bytes_of<float>({1, 0.5, 1.0078125, 3}), DType::kBF16, two,
                 CastRule::kExact),
            std::nullopt);
  auto four = room_for(DType::kF32, 1);
  EXPECT_EQ(cast(DType::kF64, bytes_of<double>({0.1}), DType::kF32, four, CastRule::kExact), 0);
  // An infinity that fp16 has, a subnormal that it has not.
  auto half = room_for(DType::kF16, 2);
  EXPECT_EQ(cast(DType::kF32, bytes_of<float>({kInfinity, 0x1p-25F}), DType::kF16, half,
                 CastRule::kExact),
            1);
}

TEST(Cast, AllPairsRoundAsTheReferenceDoes) {
  Random random(2);
  for (const auto from : kFloats) {
    for (const auto into : kFloats) {
      for (int i = 0; i < 5000; ++i) {
        auto source = random.bytes(size_of(from));
        const auto value = naive_value(from, source.data());
        if (std::isnan(value)) continue;
        auto expected = room_for(into, 1);
        naive_round(value, into, expected.data());
        const auto rounded = naive_value(into, expected.data());
        auto found = room_for(into, 1);
        const auto refused = cast(from, source, into, found, CastRule::kRound);
        ASSERT_EQ(refused.has_value(), std::isinf(rounded) && !std::isinf(value)) << value;
        if (!refused) {
          ASSERT_TRUE(support::same_bytes(expected, found)) << value;
        }
        const auto inexact = cast(from, source, into, found, CastRule::kExact);
        ASSERT_EQ(inexact.has_value(), rounded != value) << value;
      }
    }
  }
}

TEST(Cast, IsAmongFourDTypesOnly) {
  EXPECT_TRUE(can_cast(DType::kF16, DType::kF64));
  EXPECT_FALSE(can_cast(DType::kF8E4M3, DType::kBF16));
  EXPECT_FALSE(can_cast(DType::kI32, DType::kF32));
  EXPECT_FALSE(can_cast(DType::kF32, DType::kI32));
  std::vector<std::byte> one(4);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"i32"},
                    [&] { cast(DType::kI32, one, DType::kF32, one, CastRule::kExact); }));
}

// --- element_value ---

TEST(ElementValue, OfEveryFloat8PatternFollowsTheOcpFormats) {
  const auto value = [](DType dtype, int bits) {
    const auto byte = static_cast<std::byte>(bits);
    return element_value(dtype, &byte);
  };
  EXPECT_EQ(value(DType::kF8E4M3, 0x7E), 448.0);
  EXPECT_EQ(value(DType::kF8E4M3, 0x01), 0x1p-9);
  EXPECT_EQ(value(DType::kF8E4M3, 0x08), 0x1p-6);
  EXPECT_EQ(value(DType::kF8E4M3, 0x38), 1.0);
  EXPECT_EQ(value(DType::kF8E4M3, 0xB8), -1.0);
  EXPECT_TRUE(std::isnan(value(DType::kF8E4M3, 0x7F)));
  EXPECT_TRUE(std::isnan(value(DType::kF8E4M3, 0xFF)));
  EXPECT_EQ(value(DType::kF8E5M2, 0x7B), 57344.0);
  EXPECT_EQ(value(DType::kF8E5M2, 0x01), 0x1p-16);
  EXPECT_EQ(value(DType::kF8E5M2, 0x3C), 1.0);
  EXPECT_TRUE(std::isinf(value(DType::kF8E5M2, 0x7C)));
  EXPECT_TRUE(std::isnan(value(DType::kF8E5M2, 0x7D)));
  for (int bits = 0; bits < 0x7B; ++bits) {  // rises with the bits
    ASSERT_LT(value(DType::kF8E4M3, bits), value(DType::kF8E4M3, bits + 1)) << bits;
    ASSERT_LT(value(DType::kF8E5M2, bits), value(DType::kF8E5M2, bits + 1)) << bits;
    ASSERT_EQ(value(DType::kF8E5M2, bits), -value(DType::kF8E5M2, bits | 0x80)) << bits;
  }
}

TEST(ElementValue, OfIntegers) {
  EXPECT_EQ(element_value(DType::kI8, bytes_of<std::int8_t>({-3}).data()), -3);
  EXPECT_EQ(element_value(DType::kU8, bytes_of<std::uint8_t>({253}).data()), 253);
  EXPECT_EQ(element_value(DType::kBool, bytes_of<std::uint8_t>({1}).data()), 1);
  EXPECT_EQ(element_value(DType::kI16, bytes_of<std::int16_t>({-300}).data()), -300);
  EXPECT_EQ(element_value(DType::kI32, bytes_of<std::int32_t>({-70000}).data()), -70000);
  EXPECT_EQ(element_value(DType::kI64, bytes_of<std::int64_t>({1LL << 40}).data()), 0x1p40);
}

// --- ulp_distance ---

template <typename T>
std::optional<std::uint64_t> distance(DType dtype, T a, T b) {
  return ulp_distance(dtype, bytes_of<T>({a}).data(), bytes_of<T>({b}).data());
}

TEST(UlpDistance, CountsRepresentableValuesAcrossZero) {
  EXPECT_EQ(distance(DType::kF32, 1.0F, 1.0F), 0U);
  EXPECT_EQ(distance(DType::kF32, 1.0F, std::nextafter(1.0F, 2.0F)), 1U);
  EXPECT_EQ(distance(DType::kF32, -0.0F, 0.0F), 0U);
  const auto tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(distance(DType::kF32, -tiny, tiny), 2U);
  EXPECT_EQ(distance(DType::kF32, std::numeric_limits<float>::max(),
                     std::numeric_limits<float>::infinity()),
            1U);
  EXPECT_EQ(distance<std::uint16_t>(DType::kBF16, 0x3F80, 0x3F83), 3U);
  EXPECT_EQ(distance<std::uint16_t>(DType::kF16, 0x8001, 0x0001), 2U);
  EXPECT_EQ(distance<std::uint8_t>(DType::kF8E4M3, 0x38, 0x39), 1U);
}

TEST(UlpDistance, OfTheTwoFarthestDoublesFits) {
  const auto inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(distance(DType::kF64, -inf, inf), 2 * std::bit_cast<std::uint64_t>(inf));
  EXPECT_EQ(distance(DType::kF64, inf, -inf), 2 * std::bit_cast<std::uint64_t>(inf));
}

TEST(UlpDistance, OfNanAndOfIntegersIsNothing) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(distance(DType::kF32, nan, 1.0F), std::nullopt);
  EXPECT_EQ(distance(DType::kF32, nan, nan), std::nullopt);
  EXPECT_EQ(distance<std::uint8_t>(DType::kF8E4M3, 0x7F, 0x01), std::nullopt);
  EXPECT_EQ(distance<std::int32_t>(DType::kI32, 1, 1), std::nullopt);
}

}  // namespace cast_test
}  // namespace ferry::distckpt
