#include "distckpt/base/foreign_error.h"

#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>

namespace ferry {
namespace {

bool is_want_of_threads(const std::exception& error) {
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  return system != nullptr && system->code() == std::errc::resource_unavailable_try_again;
}

}  // namespace

bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr || is_want_of_threads(error);
}

Error as_error(const std::exception& error) {
  if (const auto* const own = dynamic_cast<const Error*>(&error)) return *own;
  if (is_want_of_threads(error))
    return {ErrorKind::kIo, "no thread could be started: out of memory, or of threads"};
  if (is_out_of_memory(error)) return {ErrorKind::kIo, "out of memory"};
  if (const auto* const of_file = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    if (of_file->path1().empty()) return {ErrorKind::kIo, error.what()};
    // libstdc++: "filesystem error: cannot create directory: ..."
    const bool makes = std::string_view(error.what()).find(": cannot create") != std::string::npos;
    return {ErrorKind::kIo, fmt::format("{}: cannot be {}: {}", of_file->path1().string(),
                                        makes ? "created" : "examined", of_file->code().message())};
  }
  return {ErrorKind::kBug, error.what()};
}

}  // namespace ferry
