// Mathematics by its meaning, as Hugging Face's math_verify judges it: \frac{2}{4} is 0.5, {1, 2}
// is {2, 1}, and 3 cm is 3. tests/interop/rewards/test_math_verify.py lists where the two differ.
#pragma once

#include <string_view>

namespace ferry::trainer::math_verify {

// 1 or 0, of the answer that math_answer.h finds.
double compute_score(std::string_view solution_str, std::string_view ground_truth);

}  // namespace ferry::trainer::math_verify
