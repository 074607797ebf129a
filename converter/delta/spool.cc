#include "converter/delta/spool.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kCopyBytes = std::int64_t{4} << 20;

// A file system without O_TMPFILE gets a name, which is taken away at once.
int open_nameless(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
  auto name = (folder / "spool-XXXXXX").string();
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

Spool::Spool(const fs::path& folder) : fd_(open_nameless(folder)) {
  require(static_cast<bool>(fd_), ErrorKind::kIo, "{}: {}", folder.string(), std::strerror(errno));
}

Extent Spool::append(std::span<const std::byte> bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  const Extent extent{.offset = end_.fetch_add(size), .size = size};
  for (std::int64_t done = 0; done < size;) {
    const auto count = ::pwrite(fd_.get(), bytes.data() + done,
                                static_cast<std::size_t>(size - done), extent.offset + done);
    if (count < 0 && errno == EINTR) continue;
    require(count > 0, ErrorKind::kIo, "writing the delta's spool: {}", std::strerror(errno));
    done += count;
  }
  return extent;
}

void Spool::read(const Extent& extent, std::int64_t offset, std::span<std::byte> into) const {
  for (std::size_t done = 0; done < into.size();) {
    const auto count = ::pread(fd_.get(), into.data() + done, into.size() - done,
                               extent.offset + offset + static_cast<std::int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    require(count > 0, ErrorKind::kIo, "reading the delta's spool: {}", std::strerror(errno));
    done += static_cast<std::size_t>(count);
  }
}

std::int64_t write_spooled(const fs::path& path,
                           const std::vector<SpooledTensor>& tensors,
                           const std::map<std::string, std::string>& metadata,
                           const Spool& spool) {
  std::map<std::string_view, const SpooledTensor*> by_name;
  std::vector<distckpt::SafetensorsEntry> entries;
  for (const auto& tensor : tensors) {
    auto bytes = static_cast<std::int64_t>(tensor.head.size());
    for (const auto& piece : tensor.pieces) bytes += piece.size;
    entries.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = distckpt::Shape{bytes / size_of(tensor.dtype)}});
    by_name.emplace(tensor.name, &tensor);
  }
  const auto header =
      distckpt::make_safetensors_header(path.filename().string(), std::move(entries), metadata);
  const distckpt::WriteFile file(path, header.file_size);
  file.write_at(0, distckpt::as_bytes(header.prefix));
  std::vector<std::byte> buffer;
  for (const auto& entry : header.entries) {
    const auto& tensor = *by_name.at(entry.name);
    file.write_at(entry.begin, tensor.head);
    auto at = entry.begin + static_cast<std::int64_t>(tensor.head.size());
    for (const auto& piece : tensor.pieces) {
      for (std::int64_t done = 0; done < piece.size;) {
        buffer.resize(static_cast<std::size_t>(std::min(kCopyBytes, piece.size - done)));
        spool.read(piece, done, buffer);
        file.write_at(at, buffer);
        done += static_cast<std::int64_t>(buffer.size());
        at += static_cast<std::int64_t>(buffer.size());
      }
    }
  }
  file.sync();
  return header.file_size;
}

}  // namespace ferry::converter
