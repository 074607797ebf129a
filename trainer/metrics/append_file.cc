#include "trainer/metrics/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::trainer {

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code told_by_open;
  std::filesystem::create_directories(path_.parent_path(), told_by_open);
  fd_ =
      distckpt::Descriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  require(static_cast<bool>(fd_), ErrorKind::kIo, "{}: cannot be opened: {}", path_.string(),
          distckpt::system_error_text(errno));
}

void AppendFile::append(std::string_view bytes) const {
  while (!bytes.empty()) {
    const auto count = ::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    require(count >= 0, ErrorKind::kIo, "{}: cannot be written: {}", path_.string(),
            distckpt::system_error_text(errno));
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace ferry::trainer
