// Geometry3K: nine tenths for what stands in the last \boxed{}, one tenth for the form of thoughts
// and a box behind them (verl utils/reward_score/geo3k.py).
#pragma once

#include <string_view>

namespace ferry::trainer::geo3k {

double compute_score(std::string_view solution_str, std::string_view ground_truth);

}  // namespace ferry::trainer::geo3k
