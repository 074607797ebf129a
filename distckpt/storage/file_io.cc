#include "distckpt/storage/file_io.h"

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
#include <random>
#include <system_error>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/remote_tree.h"
#include "distckpt/storage/source_files.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kDirectAlignment = 4096;

[[noreturn]] void fail_io(const fs::path& path, std::string_view what, int error) {
  const auto kind = error == ENOENT ? ErrorKind::kNotFound : ErrorKind::kIo;
  throw Error(
      kind, fmt::format("{}: {}: {}", path.string(), what, system_error_text(error)),
      error == EMFILE ? "this process may open no more files: raise the limit (ulimit -n)" : "");
}

int open_retry(const fs::path& path, int flags, mode_t mode = 0) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// Reads until `into` holds `enough` bytes or the file ends; the number of bytes read.
std::int64_t pread_fully(const fs::path& path,
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

void pwrite_fully(const fs::path& path,
                  int fd,
                  std::int64_t offset,
                  std::span<const std::byte> from) {
  std::size_t done = 0;
  while (done < from.size()) {
    const auto count = ::pwrite(fd, from.data() + done, from.size() - done,
                                offset + static_cast<std::int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_io(path, fmt::format("writing at byte {}", offset), errno);
    done += static_cast<std::size_t>(count);
  }
}

// tmpfs takes O_DIRECT since Linux 6.6, and still has no disk below it.
bool in_memory(int fd) {
  struct statfs status {};
  return ::fstatfs(fd, &status) == 0 &&
         (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

std::int64_t nanoseconds(const struct timespec& time) {
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

FileIdentity identity(const struct stat& status) {
  return {.device = status.st_dev,
          .inode = status.st_ino,
          .size = status.st_size,
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim),
          .mode = status.st_mode & 07777U};
}

FileIdentity identity(const fs::path& address, const RemoteObject& object) {
  std::uint64_t digest = 0xcbf29ce484222325U;  // FNV-1a
  for (const char c : address.string() + '\n' + object.version())
    digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return {.device = ~std::uint64_t{0}, .inode = digest, .size = object.size(), .mode = 0644};
}

// A name beside `path` that nothing has, and nobody can foresee.
fs::path temporary_beside(const fs::path& path) {
  std::random_device random;
  auto name = path;
  name += fmt::format(".{:08x}{:08x}{}", random(), random(), kTemporarySuffix);
  return name;
}

}  // namespace

std::string system_error_text(int error) {
  return std::generic_category().message(error);
}

FileIdentity identity_of(const fs::path& path) {
  if (is_remote(path)) {
    auto& tree = RemoteTree::instance();
    if (tree.is_folder(path)) return {.mode = 0755};
    const auto local = tree.local_copy(path);
    return local.empty() ? identity(path, *tree.open(path)) : identity_of(local);
  }
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_io(path, "cannot be examined", errno);
  return identity(status);
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

ReadFile::ReadFile(fs::path path, ReadMode mode) : path_(std::move(path)) {
  fs::path local;
  if (is_remote(path_)) {
    auto& tree = RemoteTree::instance();
    local = tree.local_copy(path_);
    if (local.empty()) {
      remote_ = tree.open(path_);
      identity_ = ferry::distckpt::identity(path_, *remote_);
      SourceFiles::note(*this);
      return;
    }
  }
  const auto& opened = local.empty() ? path_ : local;
  if (mode == ReadMode::kDirect) {
    fd_ = Descriptor(open_retry(opened, O_RDONLY | O_NONBLOCK | O_DIRECT));
    direct_ = fd_ && !in_memory(fd_.get());
  }
  // O_NONBLOCK: to open a pipe would else wait for someone to write to it.
  if (!fd_) fd_ = Descriptor(open_retry(opened, O_RDONLY | O_NONBLOCK));
  if (!fd_) fail_io(path_, "cannot be opened", errno);
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail_io(path_, "cannot be examined", errno);
  require(S_ISREG(status.st_mode), ErrorKind::kIo, "{}: is not a regular file", path_.string());
  identity_ = ferry::distckpt::identity(status);
  SourceFiles::note(*this);
}

void ReadFile::read_at(std::int64_t offset, std::span<std::byte> into) const {
  const auto wanted = static_cast<std::int64_t>(into.size());
  require(offset >= 0 && offset <= size() && wanted <= size() - offset, ErrorKind::kCorrupt,
          "{}: ends at byte {}, bytes {} to {} are needed", path_.string(), size(), offset,
          static_cast<std::uint64_t>(offset) + into.size());  // an offset may be anything
  if (remote_) return remote_->read_at(offset, into);
  if (direct_) return read_direct(offset, into);
  const auto count = pread_fully(path_, fd_.get(), offset, into, wanted);
  require(count == wanted, ErrorKind::kCorrupt,
          "{}: ends at byte {}, but had {} bytes when it was opened", path_.string(),
          offset + count, size());
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
    const auto length = std::min(kPiece, round_up(needed, kDirectAlignment));
    // The last piece of a file is shorter than its buffer: to read on behind it would be unaligned.
    const auto count = pread_fully(path_, fd_.get(), start,
                                   std::span(buffer.get(), static_cast<std::size_t>(length)),
                                   std::min(needed, length));
    const auto useful = std::min(count - (position - start), wanted - done);
    require(useful > 0, ErrorKind::kCorrupt,
            "{}: ends at byte {}, but had {} bytes when it was opened", path_.string(),
            start + count, size());
    std::memcpy(into.data() + done, buffer.get() + (position - start),
                static_cast<std::size_t>(useful));
    done += useful;
  }
}

void ReadFile::require_unchanged() const {
  if (remote_) return;  // every answer to a read was of the same state
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) fail_io(path_, "cannot be examined", errno);
  require(ferry::distckpt::identity(status) == identity_, ErrorKind::kIo,
          "{}: was changed by someone else while it was read", path_.string());
}

void ReadFile::require_inside(const fs::path& folder) const {
  if (is_remote(path_)) return;  // stores have no links
  const auto real_folder = fs::canonical(folder);
  const auto real = fs::canonical(path_);
  const auto lies_in = [&](const fs::path& outer) {
    return std::ranges::mismatch(outer, real).in1 == outer.end();
  };
  const auto snapshots = real_folder.parent_path();  // models--a--b/snapshots/<commit>
  const bool inside =
      lies_in(real_folder) || (snapshots.filename() == "snapshots" &&
                               real.parent_path() == snapshots.parent_path() / "blobs");
  if (inside && identity_of(real) == identity_) return;
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: is a symbolic link to {}, outside of {}", path_.string(),
                          real.string(), folder.string()),
              "put a copy in its place, or take what it leads to with --follow-symlinks");
}

WriteFile::WriteFile(fs::path path, std::int64_t size, Mode mode) : path_(std::move(path)) {
  const int flags = O_RDWR | O_CREAT | O_NOFOLLOW | (mode == Mode::kCreate ? O_TRUNC : 0);
  fd_ = Descriptor(open_retry(path_, flags, 0644));
  if (!fd_) fail_io(path_, "cannot be created", errno);
  if (::ftruncate(fd_.get(), size) != 0) {
    fail_io(path_, fmt::format("cannot be made {} bytes long", size), errno);
  }
}

void WriteFile::write_at(std::int64_t offset, std::span<const std::byte> from) const {
  pwrite_fully(path_, fd_.get(), offset, from);
}

void WriteFile::sync() const {
  if (::fsync(fd_.get()) != 0) fail_io(path_, "cannot be made durable", errno);
}

void WriteFile::discard(std::int64_t offset, std::int64_t size) const {
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
}

void allow_open_files(std::size_t count) {
  constexpr rlim_t kOthers = 256;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= count + kOthers) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, count + kOthers);
  // If the limit cannot be raised, the file that cannot be opened is named.
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::string read_text(const fs::path& path, std::int64_t limit) {
  return read_text(ReadFile(path), limit);
}

std::string read_text(const ReadFile& file, std::int64_t limit) {
  require(file.size() <= limit, ErrorKind::kCorrupt,
          "{}: {} bytes, more than {} are not expected here", file.path().string(), file.size(),
          limit);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text(const fs::path& path, std::string_view text) {
  const WriteFile file(path, static_cast<std::int64_t>(text.size()));
  file.write_at(0, as_bytes(text));
  file.sync();
}

void replace_text(const fs::path& path, std::string_view text, unsigned mode) {
  struct stat there {};
  const bool keeps_mode = ::lstat(path.c_str(), &there) == 0 && S_ISREG(there.st_mode);
  const auto temporary = temporary_beside(path);
  const Descriptor file(open_retry(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, mode));
  if (!file) fail_io(path, "cannot be created", errno);
  try {
    if (keeps_mode && ::fchmod(file.get(), there.st_mode & 0777U) != 0)
      fail_io(path, "cannot be given its permissions", errno);
    pwrite_fully(path, file.get(), 0, as_bytes(text));
    if (::fsync(file.get()) != 0) fail_io(path, "cannot be made durable", errno);
    if (::rename(temporary.c_str(), path.c_str()) != 0) fail_io(path, "cannot be replaced", errno);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory(path.has_parent_path() ? path.parent_path() : fs::path("."));
}

void sync_directory(const fs::path& path) {
  const Descriptor directory(open_retry(path, O_RDONLY | O_DIRECTORY));
  if (!directory) fail_io(path, "cannot be opened", errno);
  if (::fsync(directory.get()) != 0) fail_io(path, "cannot be made durable", errno);
}

}  // namespace ferry::distckpt
