#include "distckpt/file_io.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "distckpt/error.h"

namespace ferry::distckpt {
namespace {

constexpr std::int64_t kDirectAlignment = 4096;

[[noreturn]] void fail_io(const std::filesystem::path& path, std::string_view what, int error) {
  const auto kind = error == ENOENT ? ErrorKind::kNotFound : ErrorKind::kIo;
  throw Error(kind, fmt::format("{}: {}: {}", path.string(), what, system_error_text(error)));
}

int open_retry(const std::filesystem::path& path, int flags, mode_t mode = 0) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// Reads until `into` holds `enough` bytes or the file ends; the number of bytes read.
std::int64_t pread_fully(const std::filesystem::path& path,
                         int fd,
                         std::int64_t offset,
                         std::span<std::byte> into,
                         std::int64_t enough) {
  std::size_t done = 0;
  while (done < static_cast<std::size_t>(enough)) {
    const auto count = ::pread(fd, into.data() + done, into.size() - done,
                               offset + static_cast<std::int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io(path, fmt::format("reading at byte {}", offset), errno);
    if (count == 0) break;
    done += static_cast<std::size_t>(count);
  }
  return static_cast<std::int64_t>(done);
}

// tmpfs takes O_DIRECT since Linux 6.6, and still has no disk below it.
bool in_memory(int fd) {
  struct statfs status {};
  return ::fstatfs(fd, &status) == 0 &&
         (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

std::int64_t modified_ns(const struct stat& status) {
  return status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
}

}  // namespace

std::string system_error_text(int error) {
  return std::generic_category().message(error);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int Descriptor::release() {
  return std::exchange(fd_, -1);
}

ReadFile::ReadFile(std::filesystem::path path, ReadMode mode) : path_(std::move(path)) {
  if (mode == ReadMode::kDirect) {
    fd_ = Descriptor(open_retry(path_, O_RDONLY | O_NONBLOCK | O_DIRECT));
    direct_ = fd_ && !in_memory(fd_.get());
  }
  // O_NONBLOCK: to open a pipe would else wait for someone to write to it.
  if (!fd_) fd_ = Descriptor(open_retry(path_, O_RDONLY | O_NONBLOCK));
  if (!fd_) fail_io(path_, "cannot be opened", errno);
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail_io(path_, "cannot be examined", errno);
  require(S_ISREG(status.st_mode), ErrorKind::kIo, "{}: is not a regular file", path_.string());
  size_ = status.st_size;
  modified_ns_ = modified_ns(status);
}

void ReadFile::read_at(std::int64_t offset, std::span<std::byte> into) const {
  const auto wanted = static_cast<std::int64_t>(into.size());
  require(offset >= 0 && offset <= size_ && wanted <= size_ - offset, ErrorKind::kCorrupt,
          "{}: ends at byte {}, bytes {} to {} are needed", path_.string(), size_, offset,
          static_cast<std::uint64_t>(offset) + into.size());  // an offset may be anything
  if (direct_) return read_direct(offset, into);
  const auto count = pread_fully(path_, fd_.get(), offset, into, wanted);
  require(count == wanted, ErrorKind::kCorrupt,
          "{}: ends at byte {}, but had {} bytes when it was opened", path_.string(),
          offset + count, size_);
}

// O_DIRECT wants aligned offsets, lengths and memory: reads aligned pieces into a buffer of this
// thread and copies.
void ReadFile::read_direct(std::int64_t offset, std::span<std::byte> into) const {
  constexpr std::int64_t kPiece = std::int64_t{4} << 20;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  thread_local const std::unique_ptr<std::byte, Free> buffer(
      static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, kPiece)));
  require(buffer != nullptr, ErrorKind::kIo, "out of memory");
  std::int64_t done = 0;
  const auto wanted = static_cast<std::int64_t>(into.size());
  while (done < wanted) {
    const auto position = offset + done;
    const auto start = position / kDirectAlignment * kDirectAlignment;
    const auto needed = position - start + wanted - done;
    const auto length =
        std::min(kPiece, (needed + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment);
    // The last piece of a file is shorter than its buffer: to read on behind it would be unaligned.
    const auto count = pread_fully(path_, fd_.get(), start,
                                   std::span(buffer.get(), static_cast<std::size_t>(length)),
                                   std::min(needed, length));
    const auto useful = std::min(count - (position - start), wanted - done);
    require(useful > 0, ErrorKind::kCorrupt,
            "{}: ends at byte {}, but had {} bytes when it was opened", path_.string(),
            start + count, size_);
    std::memcpy(into.data() + done, buffer.get() + (position - start),
                static_cast<std::size_t>(useful));
    done += useful;
  }
}

void ReadFile::require_unchanged() const {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail_io(path_, "cannot be examined", errno);
  require(status.st_size == size_ && modified_ns(status) == modified_ns_, ErrorKind::kIo,
          "{}: was changed by someone else while it was read", path_.string());
}

WriteFile::WriteFile(std::filesystem::path path, std::int64_t size, Mode mode)
    : path_(std::move(path)) {
  const int flags = O_RDWR | O_CREAT | (mode == Mode::kCreate ? O_TRUNC : 0);
  fd_ = Descriptor(open_retry(path_, flags, 0644));
  if (!fd_) fail_io(path_, "cannot be created", errno);
  if (::ftruncate(fd_.get(), size) != 0) {
    fail_io(path_, fmt::format("cannot be made {} bytes long", size), errno);
  }
}

void WriteFile::write_at(std::int64_t offset, std::span<const std::byte> from) const {
  std::size_t done = 0;
  while (done < from.size()) {
    const auto count = ::pwrite(fd_.get(), from.data() + done, from.size() - done,
                                offset + static_cast<std::int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io(path_, fmt::format("writing at byte {}", offset), errno);
    done += static_cast<std::size_t>(count);
  }
}

void WriteFile::sync() const {
  if (::fsync(fd_.get()) != 0) fail_io(path_, "cannot be made durable", errno);
}

void allow_open_files(std::size_t count) {
  constexpr rlim_t kOthers = 256;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= count + kOthers) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, count + kOthers);
  // Where it is refused, the file that cannot be opened is named.
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::string read_text(const std::filesystem::path& path, std::int64_t limit) {
  const ReadFile file(path);
  require(file.size() <= limit, ErrorKind::kCorrupt,
          "{}: {} bytes, more than {} are not expected here", path.string(), file.size(), limit);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  const WriteFile file(path, static_cast<std::int64_t>(text.size()));
  file.write_at(0, as_bytes(text));
  file.sync();
}

void sync_directory(const std::filesystem::path& path) {
  const Descriptor directory(open_retry(path, O_RDONLY | O_DIRECTORY));
  if (!directory) fail_io(path, "cannot be opened", errno);
  if (::fsync(directory.get()) != 0) fail_io(path, "cannot be made durable", errno);
}

}  // namespace ferry::distckpt
