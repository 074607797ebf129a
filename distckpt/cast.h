// Changes of floating-point dtype: to nearest, ties to even, as torch's Tensor.to does; never
// silently to infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distckpt/dtype.h"

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

// How many representable values lie between two elements of a floating-point dtype: 0 if equal
// (also -0 and 0); nothing if either is NaN, or for integers.
std::optional<std::uint64_t> ulp_distance(DType dtype, const std::byte* a, const std::byte* b);

}  // namespace ferry::distckpt
