#include "models/device/memory_error.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <new>

#include "distckpt/base/foreign_error.h"

namespace ferry::models {

bool says_out_of_memory(std::string_view text) {
  // NCCL names what it could not allocate (src/include/alloc.h), not why.
  return std::ranges::any_of(
      std::initializer_list<std::string_view>{"can't allocate memory", "out of memory",
                                              "ALLOC_FAILED", "Failed to CUDA calloc",
                                              "Failed to CUDA malloc", "Failed to CUDA host alloc"},
      [&](std::string_view phrase) { return text.find(phrase) != std::string_view::npos; });
}

bool is_out_of_memory(const std::exception& error) {
  const auto* const library = dynamic_cast<const c10::Error*>(&error);
  if (library == nullptr) return ferry::is_out_of_memory(error);
  return dynamic_cast<const c10::OutOfMemoryError*>(library) != nullptr ||
         says_out_of_memory(library->what_without_backtrace());
}

std::string asked_for(const std::exception& error) {
  if (dynamic_cast<const c10::Error*>(&error) == nullptr)
    return dynamic_cast<const std::bad_alloc*>(&error) != nullptr
               ? "the host has no more"
               : "no thread could be started for want of it";
  const std::string what = text_of(error);
  for (const std::string_view phrase : {"tried to allocate", "failed to CUDA"}) {
    const auto begin = what.find(phrase.substr(1));  // the first letter may be a capital
    if (begin != std::string::npos)
      return fmt::format("{}{}", phrase[0],
                         what.substr(begin, what.find_first_of('\n', begin) - begin));
  }
  return "no memory was left";
}

std::string text_of(const std::exception& error) {
  const auto* const library = dynamic_cast<const c10::Error*>(&error);
  return library != nullptr ? library->what_without_backtrace() : error.what();
}

OutOfMemory out_of_memory(const std::exception& error,
                          const std::string& doing,
                          const std::string& hint) {
  const bool of_host = dynamic_cast<const c10::Error*>(&error) == nullptr;
  return {of_host ? ErrorKind::kIo : ErrorKind::kDevice,
          fmt::format("out of memory {}: {}", doing, asked_for(error)), hint};
}

Error error_of(const std::exception& error, const std::string& doing, const std::string& hint) {
  if (!is_out_of_memory(error)) return Error(ErrorKind::kBug, text_of(error));
  return out_of_memory(error, doing, hint);
}

}  // namespace ferry::models
