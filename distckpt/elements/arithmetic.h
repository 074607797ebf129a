// The one piece of arithmetic on elements: a whole number is added.
#pragma once

#include <cstddef>
#include <span>

#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

// Adds `number` to packed elements of a floating-point dtype, rounding once to nearest even, as
// torch's Tensor.add_ does on a CPU. NaN stays NaN.
void add_number(DType dtype, std::span<std::byte> elements, int number);

}  // namespace ferry::distckpt
