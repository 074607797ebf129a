// What LibTorch throws where there is no memory, told from its other errors.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "distckpt/error.h"

namespace ferry::models {

// Of a device or of the host: its allocators, cuBLAS and CUDA itself throw a c10::Error like any
// other.
bool is_out_of_memory(const c10::Error& error);

// How much was asked for: "tried to allocate 2.00 GiB", where that was said.
std::string asked_for(const c10::Error& error);

// As an Error, without the backtrace: kDevice with the hint where there was no memory, else kBug.
// `doing`: "out of memory <doing>".
Error error_of(const c10::Error& error, const std::string& doing, const std::string& hint);

}  // namespace ferry::models
