// What LibTorch and the standard library throw where there is no memory, told from their other
// errors.
#pragma once

#include <exception>
#include <string>

#include "distckpt/base/error.h"

namespace ferry::models {

// Of a device or of the host: LibTorch's allocators, cuBLAS and CUDA itself throw a c10::Error like
// any other; and what the host lacks may be a thread.
bool is_out_of_memory(const std::exception& error);

// How much was asked for, where that was said: "tried to allocate 2.00 GiB".
std::string asked_for(const std::exception& error);

// what(), without LibTorch's backtrace.
std::string text_of(const std::exception& error);

// As an Error: "out of memory <doing>: ..." with the hint, or what it says as kBug.
Error error_of(const std::exception& error, const std::string& doing, const std::string& hint);

// Runs `body`. Where it runs out of memory, throws error_of().
template <typename Body>
decltype(auto) or_out_of_memory(const std::string& doing, const std::string& hint, Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) throw;
    throw error_of(error, doing, hint);
  }
}

}  // namespace ferry::models
