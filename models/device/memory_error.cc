#include "models/device/memory_error.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <new>

#include "distckpt/base/foreign_error.h"

namespace ferry::models {

bool is_out_of_memory(const std::exception& error) {
  const auto* const library = dynamic_cast<const c10::Error*>(&error);
  if (library == nullptr) return ferry::is_out_of_memory(error);
  if (dynamic_cast<const c10::OutOfMemoryError*>(library) != nullptr) return true;
  const std::string what = library->what_without_backtrace();
  return std::ranges::any_of(
      std::initializer_list<const char*>{"can't allocate memory", "out of memory", "ALLOC_FAILED"},
      [&](const char* text) { return what.find(text) != std::string::npos; });
}

std::string asked_for(const std::exception& error) {
  if (dynamic_cast<const c10::Error*>(&error) == nullptr)
    return dynamic_cast<const std::bad_alloc*>(&error) != nullptr
               ? "the host has no more"
               : "no thread could be started for want of it";
  const std::string what = text_of(error);
  const auto begin = what.find("ried to allocate");
  if (begin == std::string::npos) return "no memory was left";
  return fmt::format("t{}", what.substr(begin, what.find_first_of('\n', begin) - begin));
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
