#include "distckpt/elements/difference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "distckpt/elements/cast.h"
#include "tests/support/naive_cast.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace difference_test {

using support::Random;

// The same, element by element and in the plainest way.
ElementDifference naive(DType dtype,
                        const std::vector<std::byte>& left,
                        const std::vector<std::byte>& right) {
  const auto size = static_cast<std::size_t>(size_of(dtype));
  ElementDifference result;
  auto& counts = result.counts;
  for (std::size_t at = 0; at < left.size(); at += size, ++counts.elements) {
    const auto a = support::naive_value(dtype, &left[at]);
    const auto b = support::naive_value(dtype, &right[at]);
    counts.left_nans += std::isnan(a) ? 1 : 0;
    counts.right_nans += std::isnan(b) ? 1 : 0;
    counts.left_infinities += std::isinf(a) ? 1 : 0;
    counts.right_infinities += std::isinf(b) ? 1 : 0;
    if (std::isfinite(a)) result.squares.left += a * a;
    if (std::isfinite(b)) result.squares.right += b * b;
    const bool finite = std::isfinite(a) && std::isfinite(b);
    if (finite) result.squares.difference += (a - b) * (a - b);
    if (std::memcmp(&left[at], &right[at], size) == 0) {
      ++counts.ulps[0];
      continue;
    }
    if (counts.first_different < 0) counts.first_different = counts.elements;
    ++counts.different;
    if (!finite) continue;
    counts.max_difference = std::max(counts.max_difference.value_or(0), std::fabs(a - b));
    const auto ulps = *ulp_distance(dtype, &left[at], &right[at]);
    counts.max_ulps = std::max(counts.max_ulps.value_or(0), ulps);
    std::size_t bucket = 0;
    for (double last = 0; static_cast<double>(ulps) > last && bucket + 1 < kUlpBuckets; ++bucket)
      last = last == 0 ? 1 : 2 * last;
    ++counts.ulps[bucket];
  }
  return result;
}

void expect_same(const ElementDifference& found, const ElementDifference& expected) {
  EXPECT_EQ(found.counts.elements, expected.counts.elements);
  EXPECT_EQ(found.counts.different, expected.counts.different);
  EXPECT_EQ(found.counts.first_different, expected.counts.first_different);
  EXPECT_EQ(found.counts.left_nans, expected.counts.left_nans);
  EXPECT_EQ(found.counts.left_infinities, expected.counts.left_infinities);
  EXPECT_EQ(found.counts.right_nans, expected.counts.right_nans);
  EXPECT_EQ(found.counts.right_infinities, expected.counts.right_infinities);
  EXPECT_EQ(found.counts.max_difference, expected.counts.max_difference);
  EXPECT_EQ(found.counts.max_ulps, expected.counts.max_ulps);
  EXPECT_EQ(found.counts.ulps, expected.counts.ulps);
  EXPECT_DOUBLE_EQ(found.squares.left, expected.squares.left);
  EXPECT_NEAR(found.squares.right, expected.squares.right, 1e-12 * expected.squares.right);
  EXPECT_NEAR(found.squares.difference, expected.squares.difference,
              1e-12 * expected.squares.difference);
}

// Values of the size of weights; some elements of `right` another, a few not finite.
struct Pair {
  std::vector<std::byte> left;
  std::vector<std::byte> right;
};
Pair random_pair(Random& random, DType dtype, std::int64_t elements, bool nonfinite) {
  const auto size = size_of(dtype);
  Pair pair;
  pair.left.resize(static_cast<std::size_t>(elements * size));
  const auto draw = [&] {
    return static_cast<double>(random.between(-1000, 1000)) *
           std::ldexp(1.0, static_cast<int>(random.between(-12, 0)));
  };
  for (std::int64_t i = 0; i < elements; ++i)
    support::naive_round(draw(), dtype, &pair.left[static_cast<std::size_t>(i * size)]);
  pair.right = pair.left;
  const auto changes = random.between(0, elements);
  for (std::int64_t i = 0; i < changes; ++i) {
    auto* const at = &pair.right[static_cast<std::size_t>(random.between(0, elements - 1) * size)];
    if (random.chance(50)) {
      support::naive_round(draw(), dtype, at);
    } else {
      *at ^= std::byte{1};
    }
  }
  if (!nonfinite) return pair;
  for (auto* side : {&pair.left, &pair.right}) {
    for (const auto value :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
          -std::numeric_limits<double>::infinity(), -0.0, 0.0}) {
      const auto at = random.between(0, elements - 1) * size;
      support::naive_round(value, dtype, &(*side)[static_cast<std::size_t>(at)]);
    }
  }
  return pair;
}

TEST(Difference, IsWhatElementByElementGives) {
  Random random(1);
  for (const auto dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
    for (int i = 0; i < 60; ++i) {
      SCOPED_TRACE(std::string(short_name(dtype)) + " " + std::to_string(i));
      const auto pair = random_pair(random, dtype, random.between(1, 5000), i % 2 == 1);
      expect_same(compare_elements(dtype, pair.left, pair.right),
                  naive(dtype, pair.left, pair.right));
    }
  }
}

TEST(Difference, OfEqualElementsIsNothingButTheirNorm) {
  Random random(2);
  const auto pair = random_pair(random, DType::kBF16, 4321, true);
  const auto same = compare_elements(DType::kBF16, pair.left, pair.left);
  EXPECT_EQ(same.counts.different, 0);
  EXPECT_EQ(same.counts.first_different, -1);
  EXPECT_EQ(same.counts.ulps[0], 4321);
  EXPECT_FALSE(same.counts.max_difference);
  EXPECT_EQ(same.squares.left, same.squares.right);
  EXPECT_EQ(same.relative_difference(), 0);
  EXPECT_GT(same.counts.right_nans, 0);
}

TEST(Difference, OfSignsOfZeroIsNoDistance) {
  const std::vector<float> zero{0.0F, 1.0F};
  const std::vector<float> minus{-0.0F, 1.0F};
  const auto found = compare_elements(DType::kF32, std::as_bytes(std::span(zero)),
                                      std::as_bytes(std::span(minus)));
  EXPECT_EQ(found.counts.different, 1);
  EXPECT_EQ(found.counts.ulps[0], 2);
  EXPECT_EQ(found.counts.max_ulps, 0U);
  EXPECT_EQ(found.counts.max_difference, 0.0);
}

TEST(Difference, CountsDistancesInPowersOfTwo) {
  EXPECT_EQ(ulp_bucket(0), 0U);
  EXPECT_EQ(ulp_bucket(1), 1U);
  EXPECT_EQ(ulp_bucket(2), 2U);
  EXPECT_EQ(ulp_bucket(3), 3U);
  EXPECT_EQ(ulp_bucket(4), 3U);
  EXPECT_EQ(ulp_bucket(5), 4U);
  for (std::size_t bucket = 0; bucket + 1 < kUlpBuckets; ++bucket) {
    EXPECT_EQ(ulp_bucket(largest_ulps_of(bucket)), bucket);
    EXPECT_EQ(ulp_bucket(largest_ulps_of(bucket) + 1), bucket + 1);
  }
  EXPECT_EQ(ulp_bucket(std::numeric_limits<std::uint64_t>::max()), kUlpBuckets - 1);
}

TEST(Difference, TakesTheFarthestDoublesThereAre) {
  const std::vector<double> low{-std::numeric_limits<double>::max()};
  const std::vector<double> high{std::numeric_limits<double>::max()};
  const auto found =
      compare_elements(DType::kF64, std::as_bytes(std::span(low)), std::as_bytes(std::span(high)));
  EXPECT_EQ(found.counts.max_ulps, 2 * (std::uint64_t{0x7FF0} << 48) - 2);
  EXPECT_EQ(found.counts.ulps[kUlpBuckets - 1], 1);
}

TEST(Difference, ComparesIntegersAndEightBitFloatsToo) {
  const std::vector<std::uint8_t> left{0, 1, 128, 255};
  const std::vector<std::uint8_t> right{0, 3, 128, 0};
  const auto integers =
      compare_elements(DType::kU8, std::as_bytes(std::span(left)), std::as_bytes(std::span(right)));
  EXPECT_EQ(integers.counts.different, 2);
  EXPECT_EQ(integers.counts.max_difference, 255.0);
  EXPECT_FALSE(integers.counts.max_ulps);
  EXPECT_EQ(integers.squares.difference, 4 + 255.0 * 255.0);
  const auto floats = compare_elements(DType::kF8E5M2, std::as_bytes(std::span(left)),
                                       std::as_bytes(std::span(right)));
  EXPECT_EQ(floats.counts.left_nans, 1);  // 255
  EXPECT_EQ(floats.counts.max_ulps, 2U);
}

TEST(Difference, AddsUp) {
  Random random(3);
  auto whole = random_pair(random, DType::kF16, 3000, true);
  ElementDifference sum;
  for (std::size_t at = 0; at < whole.left.size(); at += 1500) {
    const auto part = [&](const std::vector<std::byte>& side) {
      return std::span(side).subspan(at, 1500);
    };
    sum += compare_elements(DType::kF16, part(whole.left), part(whole.right));
  }
  auto expected = naive(DType::kF16, whole.left, whole.right);
  expected.counts.first_different = -1;  // is of one stretch
  expect_same(sum, expected);
}

}  // namespace difference_test
}  // namespace ferry::distckpt
