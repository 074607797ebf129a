// MATH: what stands in the last \boxed, compared with the truth after the normalisation of
// D. Hendrycks et al. (arXiv:2103.03874; verl utils/reward_score/math_reward.py).
#pragma once

#include <string_view>

namespace ferry::trainer::math_reward {

// 1 or 0.
double compute_score(std::string_view solution_str, std::string_view ground_truth);

}  // namespace ferry::trainer::math_reward
