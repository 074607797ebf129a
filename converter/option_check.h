// Options of a conversion that would change nothing of what it writes are errors: whoever gave them
// expects another target.
#pragma once

#include "converter/convert.h"

namespace ferry::converter {

// Throws Error(kUsage) naming the option, where it has no effect from `source` to `target`, or
// contradicts another.
void require_effective(const ConvertOptions& options, const Location& source, Format target);

}  // namespace ferry::converter
