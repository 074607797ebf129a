// LaTeX as plain text: \frac{\sqrt{3}}{2} is √(3)/2 (pylatexenc 2.10, latex_to_text). Commands that
// answers seldom have, such as accents, fonts and environments, lose their name and keep their
// arguments.
#pragma once

#include <optional>

#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer::latex {

// Nothing where the original raises: for a root of nothing.
std::optional<code_points::Text> to_text(code_points::View latex);

}  // namespace ferry::trainer::latex
