// The value of an expression in LaTeX, or as people type it, at a point: each variable has a number
// that its name gives. Expressions that have the same values at several points are taken for equal.
#pragma once

#include <complex>
#include <optional>
#include <string_view>

namespace ferry::trainer {

using MathValue = std::complex<double>;

// `point`: which numbers variables have, from 0. Nothing for what is no expression, for one that
// has no finite value there, and for one that is nested deeper than people write.
std::optional<MathValue> math_value(std::string_view latex, int point);

}  // namespace ferry::trainer
