// The answers of geometry, as mathruler 0.1.0 grades them after PRM800K: equal after Hendrycks'
// normalisation or its own, or of equal value. Values are compared at points, where the original
// asks sympy whether their difference is 0.
#pragma once

#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer::mathruler {

bool grade_answer(code_points::View answer, code_points::View ground_truth);

// The content of the last \boxed{}; "None" where there is none.
code_points::Text extract_boxed_content(code_points::View text);

}  // namespace ferry::trainer::mathruler
