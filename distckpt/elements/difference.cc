#include "distckpt/elements/difference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/float_kinds.h"

namespace ferry::distckpt {
namespace {

// Elements are looked at in chunks: most are equal, or finite, as a whole.
constexpr std::int64_t kChunk = 1024;
constexpr std::size_t kLanes = 8;  // sums that run side by side, as in a vector unit

// The elements of a chunk on one side. `Bits` is an unsigned integer of the element's size, or the
// element itself; `Widen` gives its value.
template <typename Bits, typename Widen>
struct Elements {
  const std::byte* bytes = nullptr;
  std::size_t count = 0;
  Widen widen;

  double operator[](std::size_t index) const {
    Bits bits;
    std::memcpy(&bits, bytes + index * sizeof(bits), sizeof(bits));
    return static_cast<double>(widen(bits));
  }
};

// The sum of square(i) over [0, count), in an order that is the same everywhere.
template <typename Square>
double sum_lanes(std::size_t count, Square&& square) {
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += square(i + lane);
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) lanes[lane] += square(i);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

// The sum of the squares of finite values; the others are counted. Without any, which a finite sum
// proves, that is one pass.
template <typename Values>
double sum_squares(const Values& values, std::int64_t& nans, std::int64_t& infinities) {
  const auto sum = sum_lanes(values.count, [&](std::size_t i) {
    const auto value = values[i];
    return value * value;
  });
  if (std::isfinite(sum)) return sum;
  for (std::size_t i = 0; i < values.count; ++i) {
    nans += std::isnan(values[i]) ? 1 : 0;
    infinities += std::isinf(values[i]) ? 1 : 0;
  }
  return sum_lanes(values.count, [&](std::size_t i) {
    const auto value = values[i];
    return std::isfinite(value) ? value * value : 0.0;
  });
}

template <typename Values>
double sum_squared_differences(const Values& left, const Values& right) {
  const auto sum = sum_lanes(left.count, [&](std::size_t i) {
    const auto difference = left[i] - right[i];
    return difference * difference;
  });
  if (std::isfinite(sum)) return sum;
  return sum_lanes(left.count, [&](std::size_t i) {
    const auto difference = left[i] - right[i];
    return std::isfinite(left[i]) && std::isfinite(right[i]) ? difference * difference : 0.0;
  });
}

template <typename Values>
double largest_difference(const Values& left, const Values& right) {
  std::array<double, kLanes> lanes{};
  for (std::size_t i = 0; i < left.count; ++i) {
    const auto difference = std::fabs(left[i] - right[i]);
    auto& largest = lanes[i % kLanes];
    // False for a NaN: of NaNs, and of infinities of one sign.
    if (difference > largest && std::isfinite(difference)) largest = difference;
  }
  return *std::ranges::max_element(lanes);
}

// Counts the elements of a chunk that differ. `Word` is an unsigned integer of their size.
template <typename Word, typename Values>
void count_different(bool floating_point,
                     const Values& left,
                     const Values& right,
                     bool all_finite,
                     ElementCounts& counts) {
  std::int64_t different = 0;
  std::int64_t finite = 0;  // of those
  std::uint64_t max_ulps = 0;
  std::array<std::array<std::uint32_t, kUlpBuckets>, 2> ulps{};  // in turns: they do not wait
  for (std::size_t i = 0; i < left.count; ++i) {
    Word a;
    Word b;
    std::memcpy(&a, left.bytes + i * sizeof(a), sizeof(a));
    std::memcpy(&b, right.bytes + i * sizeof(b), sizeof(b));
    const int differs = a == b ? 0 : 1;
    different += differs;
    // Conditions that are the same for the whole chunk come first: whether elements differ cannot
    // be foreseen.
    if (!all_finite && differs != 0 && !(std::isfinite(left[i]) && std::isfinite(right[i])))
      continue;
    finite += differs;
    if (!floating_point && differs != 0) continue;
    const auto distance = ordinal_distance(a, b);
    max_ulps = std::max(max_ulps, distance);
    ++ulps[i % 2][ulp_bucket(distance)];
  }
  counts.different += different;
  for (const auto& half : ulps) {
    for (std::size_t i = 0; i < half.size(); ++i) counts.ulps[i] += half[i];
  }
  if (finite == 0) return;
  counts.max_difference =
      std::max(counts.max_difference.value_or(0), largest_difference(left, right));
  if (floating_point) counts.max_ulps = std::max(counts.max_ulps.value_or(0), max_ulps);
}

template <typename Word, typename Bits, typename Widen>
ElementDifference compare(bool floating_point,
                          std::span<const std::byte> left,
                          std::span<const std::byte> right,
                          Widen widen) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Bits));
  ElementDifference result;
  auto& counts = result.counts;
  auto& squares = result.squares;
  counts.elements = static_cast<std::int64_t>(left.size()) / kSize;
  for (std::int64_t first = 0; first < counts.elements; first += kChunk) {
    const auto count = static_cast<std::size_t>(std::min(kChunk, counts.elements - first));
    const Elements<Bits, Widen> a{left.data() + first * kSize, count, widen};
    const Elements<Bits, Widen> b{right.data() + first * kSize, count, widen};
    std::int64_t nans = 0;
    std::int64_t infinities = 0;
    const auto sum = sum_squares(a, nans, infinities);
    squares.left += sum;
    counts.left_nans += nans;
    counts.left_infinities += infinities;
    if (std::memcmp(a.bytes, b.bytes, count * sizeof(Bits)) == 0) {
      squares.right += sum;
      counts.right_nans += nans;
      counts.right_infinities += infinities;
      counts.ulps[0] += static_cast<std::int64_t>(count);
      continue;
    }
    const auto* const mismatch =
        std::mismatch(a.bytes, a.bytes + count * sizeof(Bits), b.bytes).first;
    if (counts.first_different < 0) counts.first_different = first + (mismatch - a.bytes) / kSize;
    std::int64_t right_nans = 0;
    std::int64_t right_infinities = 0;
    squares.right += sum_squares(b, right_nans, right_infinities);
    counts.right_nans += right_nans;
    counts.right_infinities += right_infinities;
    squares.difference += sum_squared_differences(a, b);
    const bool all_finite = nans + infinities + right_nans + right_infinities == 0;
    count_different<Word>(floating_point, a, b, all_finite, counts);
  }
  return result;
}

template <std::size_t kBytes>
using WordOf = std::conditional_t<
    kBytes == 1,
    std::uint8_t,
    std::conditional_t<kBytes == 2,
                       std::uint16_t,
                       std::conditional_t<kBytes == 4, std::uint32_t, std::uint64_t>>>;

}  // namespace

std::uint64_t largest_ulps_of(std::size_t bucket) {
  if (bucket == 0) return 0;
  return bucket == kUlpBuckets - 1 ? std::numeric_limits<std::uint64_t>::max()
                                   : std::uint64_t{1} << (bucket - 1);
}

double ElementCounts::changed_share() const {
  return elements == 0 ? 0 : static_cast<double>(different) / static_cast<double>(elements);
}

ElementCounts& ElementCounts::operator+=(const ElementCounts& other) {
  elements += other.elements;
  different += other.different;
  left_nans += other.left_nans;
  left_infinities += other.left_infinities;
  right_nans += other.right_nans;
  right_infinities += other.right_infinities;
  // An empty optional is less than any value.
  max_difference = std::max(max_difference, other.max_difference);
  max_ulps = std::max(max_ulps, other.max_ulps);
  for (std::size_t i = 0; i < ulps.size(); ++i) ulps[i] += other.ulps[i];
  return *this;
}

SquareSums& SquareSums::operator+=(const SquareSums& other) {
  left += other.left;
  right += other.right;
  difference += other.difference;
  return *this;
}

double ElementDifference::left_norm() const {
  return std::sqrt(squares.left);
}
double ElementDifference::right_norm() const {
  return std::sqrt(squares.right);
}
double ElementDifference::difference_norm() const {
  return std::sqrt(squares.difference);
}

double ElementDifference::relative_difference() const {
  return squares.difference == 0 ? 0 : difference_norm() / left_norm();
}

ElementDifference& ElementDifference::operator+=(const ElementDifference& other) {
  counts += other.counts;
  squares += other.squares;
  return *this;
}

ElementDifference compare_elements(DType dtype,
                                   std::span<const std::byte> left,
                                   std::span<const std::byte> right) {
  const auto size = size_of(dtype);
  require(left.size() == right.size() && static_cast<std::int64_t>(left.size()) % size == 0,
          ErrorKind::kBug, "stretches of {} and {} bytes of {} cannot be compared", left.size(),
          right.size(), short_name(dtype));
  if (can_cast(dtype, DType::kF64)) {
    return dispatch_float(dtype, [&](auto kind) {
      using Bits = typename decltype(kind)::Bits;
      return compare<WordOf<sizeof(Bits)>, Bits>(
          true, left, right, [](Bits bits) { return decltype(kind)::widen(bits); });
    });
  }
  const auto as_words = [&]<typename Word>(Word) {
    return compare<Word, Word>(is_floating_point(dtype), left, right, [dtype](Word bits) {
      return element_value(dtype, reinterpret_cast<const std::byte*>(&bits));
    });
  };
  switch (size) {
    case 1:
      return as_words(std::uint8_t{});
    case 2:
      return as_words(std::uint16_t{});
    case 4:
      return as_words(std::uint32_t{});
    default:
      return as_words(std::uint64_t{});
  }
}

}  // namespace ferry::distckpt
