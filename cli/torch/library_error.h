// What LibTorch throws, as people are told of it: without its backtrace, and of memory that could
// not be had with what to do.
#pragma once

#include <c10/util/Exception.h>

#include "distckpt/base/error.h"

namespace ferry::cli {

Error library_error(const c10::Error& error);

}  // namespace ferry::cli
