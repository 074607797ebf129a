// Arithmetic on elements: a whole number is added, bits are combined.
#pragma once

#include <cstddef>
#include <span>

#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

// Adds `number` to packed elements of a floating-point dtype, rounding once to nearest even, as
// torch's Tensor.add_ does on a CPU. NaN stays NaN.
void add_number(DType dtype, std::span<std::byte> elements, int number);

// into ^= by, which is as long.
void exclusive_or(std::span<std::byte> into, std::span<const std::byte> by);

}  // namespace ferry::distckpt
