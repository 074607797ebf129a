#include "tests/fuzz/property.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace ferry::fuzz {

MemoryFile::MemoryFile(std::string_view bytes) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
  if (!fd_ || ::write(fd_.get(), bytes.data(), bytes.size()) != std::ssize(bytes)) {
    throw std::system_error(errno, std::generic_category(), "memfd_create");
  }
}

std::filesystem::path MemoryFile::path() const {
  return fmt::format("/proc/self/fd/{}", fd_.get());
}

void MemoryFile::resize(std::int64_t size) const {
  if (::ftruncate(fd_.get(), size) != 0) {
    throw std::system_error(errno, std::generic_category(), "ftruncate");
  }
}

}  // namespace ferry::fuzz
