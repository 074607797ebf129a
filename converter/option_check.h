// An option that would change nothing of the conversion's target is an error: the user who gave it
// expects another target.
#pragma once

#include "converter/convert.h"

namespace ferry::converter {

// Throws Error(kUsage) naming the option, where it has no effect from `source` to `target`, or
// contradicts another.
void require_effective(const ConvertOptions& options, const Checkpoint& source, Format target);

}  // namespace ferry::converter
