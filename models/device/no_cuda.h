// The refusal of whatever needs CUDA in a build without it.
#pragma once

#include "distckpt/base/error.h"

namespace ferry::models {

// Throws Error(kDevice).
[[noreturn]] inline void no_cuda() {
  throw Error(ErrorKind::kDevice, "this build has no CUDA", "configure with -Dcuda=enabled");
}

}  // namespace ferry::models
