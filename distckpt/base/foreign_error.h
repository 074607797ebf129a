// Errors of the standard library as an Error: a program's last words are of one form.
#pragma once

#include <exception>

#include "distckpt/base/error.h"

namespace ferry {

// True if the host had no more memory, or no more threads.
bool is_out_of_memory(const std::exception& error);

// An Error is itself; of the others those of memory, threads and files are kIo, and the rest kBug.
Error as_error(const std::exception& error);

}  // namespace ferry
