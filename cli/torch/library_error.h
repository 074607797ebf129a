// Errors of LibTorch as people are told of them: without the backtrace, and with advice where
// memory could not be had.
#pragma once

#include <c10/util/Exception.h>

#include "distckpt/base/error.h"

namespace ferry::cli {

Error library_error(const c10::Error& error);

}  // namespace ferry::cli
