// Tells a lack of memory from the other errors that LibTorch and the standard library throw, and
// turns it into an Error with a hint.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"

namespace ferry::models {

// True if a device or the host is out of memory. Most of LibTorch's allocators, cuBLAS and CUDA
// throw a c10::Error as for any other failure, which is told by its text. A thread that the host
// could not start counts as well.
bool is_out_of_memory(const std::exception& error);
// The same of the text of an error of CUDA or NCCL.
bool says_out_of_memory(std::string_view text);

// The amount that was asked for, "tried to allocate 2.00 GiB", or a text that says that there was
// no more.
std::string asked_for(const std::exception& error);

// what(), without LibTorch's backtrace.
std::string text_of(const std::exception& error);

class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// "out of memory <doing>: ..." with the hint: kIo of the host's memory, kDevice of a GPU's.
OutOfMemory out_of_memory(const std::exception& error,
                          const std::string& doing,
                          const std::string& hint);

// The same if `error` is_out_of_memory(), else its text as kBug.
Error error_of(const std::exception& error, const std::string& doing, const std::string& hint);

// Runs `body` and returns its result. Throws out_of_memory() if it runs out of memory; other
// exceptions pass.
template <typename Body>
decltype(auto) or_out_of_memory(const std::string& doing, const std::string& hint, Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) throw;
    throw out_of_memory(error, doing, hint);
  }
}

}  // namespace ferry::models
