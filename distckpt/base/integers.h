// Arithmetic of sizes. Values are not negative and divisors are positive; sums and products are not
// checked for overflow.
#pragma once

#include <concepts>
#include <type_traits>

#include "distckpt/base/box.h"

namespace ferry::distckpt {

// The quotient, rounded up: the number of pieces of `divisor` that hold `value`.
template <std::integral T>
constexpr T ceil_div(T value, std::type_identity_t<T> divisor) {
  return (value + divisor - 1) / divisor;
}

// The least multiple of `multiple` that is not below `value`.
template <std::integral T>
constexpr T round_up(T value, std::type_identity_t<T> multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Row-major strides of a shape, in bytes.
inline Dims byte_strides(const Shape& shape, std::int64_t element_size) {
  auto strides = row_major_strides(shape);
  for (int d = 0; d < strides.rank(); ++d) strides[d] *= element_size;
  return strides;
}

}  // namespace ferry::distckpt
