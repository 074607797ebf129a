// Mathematics as DAPO scores it: what stands behind the last "Answer:", normalised as for Minerva
// (A. Lewkowycz et al., arXiv:2206.14858), or else in the last \boxed{} (verl
// utils/reward_score/math_dapo.py).
#pragma once

#include <string>
#include <string_view>

namespace ferry::trainer::math_dapo {

struct Score {
  double score = -1;  // 1 or -1
  bool acc = false;
  std::string pred{};  // "[INVALID]" where there is no answer
};

// Only the last 300 characters are read, for a \boxed{} the last 100.
Score compute_score(std::string_view solution_str, std::string_view ground_truth);

}  // namespace ferry::trainer::math_dapo
