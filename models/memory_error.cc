#include "models/memory_error.h"

#include <algorithm>
#include <initializer_list>

namespace ferry::models {

bool is_out_of_memory(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  const std::string what = error.what_without_backtrace();
  return std::ranges::any_of(
      std::initializer_list<const char*>{"can't allocate memory", "out of memory", "ALLOC_FAILED"},
      [&](const char* text) { return what.find(text) != std::string::npos; });
}

std::string asked_for(const c10::Error& error) {
  const std::string what = error.what_without_backtrace();
  const auto begin = what.find("ried to allocate");
  if (begin == std::string::npos) return "no memory was left";
  return fmt::format("t{}", what.substr(begin, what.find_first_of('\n', begin) - begin));
}

Error error_of(const c10::Error& error, const std::string& doing, const std::string& hint) {
  if (!is_out_of_memory(error)) return Error(ErrorKind::kBug, error.what_without_backtrace());
  return Error(ErrorKind::kDevice, fmt::format("out of memory {}: {}", doing, asked_for(error)), hint);
}

}  // namespace ferry::models
