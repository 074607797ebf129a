// MATH: what stands in the last \boxed, compared with the truth after the normalisation of
// D. Hendrycks et al. (arXiv:2103.03874; verl utils/reward_score/math_reward.py).
#pragma once

#include <optional>
#include <string_view>

#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer::math_reward {

// The normalisation; nothing where the original raises. `percent`: mathruler's, which also takes %
// away that no backslash stands before.
std::optional<code_points::Text> strip_string(code_points::View text, bool percent = false);

// 1 or 0.
double compute_score(std::string_view solution_str, std::string_view ground_truth);

}  // namespace ferry::trainer::math_reward
