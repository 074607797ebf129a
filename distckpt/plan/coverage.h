// Exactly once: the rule that makes a lost expert, a dropped layer or a bias written twice
// impossible.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "distckpt/base/box.h"

namespace ferry::distckpt {

struct CoverageDefect {
  Box box{};      // a box of elements that share the defect
  int times = 0;  // how often they are covered: 0, or 2 and more
};

// The first box of `shape`, in row-major order of the cuts, that `boxes` cover not exactly once;
// nothing if there is none. Throws Error(kLayout) for a box that leaves the shape, and for boxes
// made up to take forever.
std::optional<CoverageDefect> find_coverage_defect(const Shape& shape, std::span<const Box> boxes);

// Throws Error(kLayout): "<tensor>: elements [0:2, 4:8] of shape [...] are <verb> 0 times, expected
// once".
void require_exactly_once(std::string_view tensor,
                          const Shape& shape,
                          std::span<const Box> boxes,
                          std::string_view verb);

}  // namespace ferry::distckpt
