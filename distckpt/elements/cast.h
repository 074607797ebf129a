// Changes of floating-point dtype: to nearest, ties to even, as torch's Tensor.to does; never
// silently to infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

enum class CastRule {
  kRound,  // round; a finite value that would become infinite is refused
  kExact,  // any value that would change is refused
};

bool can_cast(DType from, DType to);  // among F16, BF16, F32 and F64

// Casts packed elements; `into` does not overlap `from`. Nothing, or the index of the first element
// that `rule` refuses. NaN stays NaN: its sign and as much of its payload as fits.
std::optional<std::int64_t> cast(DType from_dtype,
                                 std::span<const std::byte> from,
                                 DType into_dtype,
                                 std::span<std::byte> into,
                                 CastRule rule);

// The value of one element of any dtype; of integers too.
double element_value(DType dtype, const std::byte* element);

// The representable values between two elements of a floating-point dtype, counted: 0 if equal
// (also -0 and 0); nothing if either is NaN, or for integers.
std::optional<std::uint64_t> ulp_distance(DType dtype, const std::byte* a, const std::byte* b);

// The same of two elements that are no NaN, by their bits as an unsigned integer.
template <typename Bits>
std::uint64_t ordinal_distance(Bits a, Bits b) {
  // Without branches: signs are random, and so is which is larger.
  const auto ordinal = [](Bits bits) {  // representable values counted from zero
    constexpr int kSign = sizeof(Bits) * 8 - 1;
    const auto magnitude = static_cast<std::int64_t>(bits & ((std::uint64_t{1} << kSign) - 1));
    const auto minus = -static_cast<std::int64_t>(bits >> kSign);
    return (magnitude ^ minus) - minus;
  };
  const auto x = ordinal(a);
  const auto y = ordinal(b);
  // Unsigned, so that the distance of two doubles of opposite sign fits.
  const auto distance = static_cast<std::uint64_t>(x) - static_cast<std::uint64_t>(y);
  const auto minus = std::uint64_t{0} - static_cast<std::uint64_t>(x < y);
  return (distance ^ minus) - minus;
}

}  // namespace ferry::distckpt
