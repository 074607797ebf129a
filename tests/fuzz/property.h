// The fuzz targets' assertions about bytes: a parser takes or refuses them, and a property holds
// of bytes that it takes.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::fuzz {

// Throws unless `ok`. No Error: a property that fails is not one that bad bytes may cause.
template <typename... Args>
void expect(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) throw std::logic_error(fmt::format(message, std::forward<Args>(args)...));
}

// Runs `body`: true if it ends, false if it throws the Error that bad bytes deserve. Every other
// exception passes.
template <typename Body>
bool accepts(Body&& body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    expect(error.kind() != ErrorKind::kBug && error.kind() != ErrorKind::kIo && *error.what() != 0,
           "an Error of kind {}: {}", to_string(error.kind()), error.what());
    return false;
  }
}

// A file in memory, for parsers that read files.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes);

  // Reads as this file for as long as it lives.
  std::filesystem::path path() const;
  void resize(std::int64_t size) const;

 private:
  distckpt::Descriptor fd_;
};

}  // namespace ferry::fuzz
