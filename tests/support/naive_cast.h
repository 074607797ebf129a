// Conversions of floating-point elements in the plainest way, by the compiler's own types where it
// has them: what distckpt/elements/cast.h is held against.
#pragma once

#include <cstddef>

#include "distckpt/base/dtype.h"

namespace ferry::support {

// An element of F16, BF16, F32 or F64; every value of these fits a double.
double naive_value(distckpt::DType dtype, const std::byte* element);

// The nearest element of that dtype, ties to even; from double to the 16-bit ones by way of float.
void naive_round(double value, distckpt::DType dtype, std::byte* element);

}  // namespace ferry::support
