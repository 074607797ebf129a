// The difference of two stretches of a tensor: counts, norms, ulps. Stretches add up: the
// counts in any order, the sums of squares to the same digits if they are added in the same order.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

// Distances in ulps by powers of two: 0, 1, 2, 3 to 4, 5 to 8, ...; the last has the rest.
inline constexpr std::size_t kUlpBuckets = 65;
constexpr std::size_t ulp_bucket(std::uint64_t ulps) {
  const std::uint64_t nonzero = ulps == 0 ? 0 : 1;
  const auto below = std::min(ulps - nonzero, ~std::uint64_t{0} >> 1);
  return nonzero + 63 - static_cast<std::size_t>(std::countl_zero(below << 1 | 1));
}
std::uint64_t largest_ulps_of(std::size_t bucket);  // 0, 1, 2, 4, 8, ...

struct ElementCounts {
  std::int64_t elements = 0;
  std::int64_t different = 0;         // whose bytes are not the same
  std::int64_t first_different = -1;  // index; of this stretch, and not added up
  std::int64_t left_nans = 0;
  std::int64_t left_infinities = 0;
  std::int64_t right_nans = 0;
  std::int64_t right_infinities = 0;

  // The largest difference of elements that differ and are finite on both sides; nothing if there
  // are none.
  std::optional<double> max_difference{};
  std::optional<std::uint64_t> max_ulps{};
  std::array<std::int64_t, kUlpBuckets> ulps{};  // 0: also elements of the same bytes

  double changed_share() const;  // 0 to 1
  ElementCounts& operator+=(const ElementCounts& other);
};

// Over finite elements; of the difference: where both are.
struct SquareSums {
  double left = 0;
  double right = 0;
  double difference = 0;

  SquareSums& operator+=(const SquareSums& other);
};

struct ElementDifference {
  ElementCounts counts{};
  SquareSums squares{};

  double left_norm() const;  // L2
  double right_norm() const;
  double difference_norm() const;
  double relative_difference()
      const;  // of the difference's norm to the left one's; may be infinite
  ElementDifference& operator+=(const ElementDifference& other);
};

// Packed elements of one dtype; both stretches have the same size.
ElementDifference compare_elements(DType dtype,
                                   std::span<const std::byte> left,
                                   std::span<const std::byte> right);

}  // namespace ferry::distckpt
