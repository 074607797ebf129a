// Files read by pread and written by pwrite: a file that is cut short is an error that names the
// byte, never a signal. A file to read may also be of a store (remote_store.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::distckpt {

class RemoteObject;

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int get() const { return fd_; }
  int release();
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Tells a file from every other, and from itself once it was changed: another file in its
// place has another device or inode, other bytes have another mtime, and no change goes without a
// new ctime.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t size = 0;         // bytes
  std::int64_t modified_ns = 0;  // mtime and ctime, since 1970
  std::int64_t changed_ns = 0;
  std::uint32_t mode = 0;  // permissions: 0644

  bool operator==(const FileIdentity&) const = default;
};

// Looks at what lies at the path, symbolic links followed. The inode of a store's file is a digest
// of its address and ETag. Throws Error(kNotFound | kIo).
FileIdentity identity_of(const std::filesystem::path& path);

enum class ReadMode {
  kCached,
  // Past the page cache (O_DIRECT): what comes back has been on the disk. Memory-backed file
  // systems have no other copy, so where O_DIRECT is refused the file is read as kCached.
  kDirect,
};

// Thread-safe: reads carry their own offset.
class ReadFile {
 public:
  // Throws Error(kNotFound | kIo). Refuses what is not a regular file.
  explicit ReadFile(std::filesystem::path path, ReadMode mode = ReadMode::kCached);

  const std::filesystem::path& path() const { return path_; }
  std::int64_t size() const { return identity_.size; }
  const FileIdentity& identity() const { return identity_; }
  bool direct() const { return direct_; }
  bool remote() const { return remote_ != nullptr; }  // each read is a request

  // Fills `into` from `offset`. Throws Error(kCorrupt) naming the byte if the file ends before.
  void read_at(std::int64_t offset, std::span<std::byte> into) const;

  // Throws Error(kIo) if the file has been changed since it was opened.
  void require_unchanged() const;

  // Throws Error(kUsage) unless the file lies in `folder`, whatever symbolic links led to it, or in
  // the blobs/ of the Hugging Face cache that `folder` is a snapshot of.
  void require_inside(const std::filesystem::path& folder) const;

 private:
  void read_direct(std::int64_t offset, std::span<std::byte> into) const;

  std::filesystem::path path_;
  Descriptor fd_;
  std::shared_ptr<const RemoteObject> remote_;
  FileIdentity identity_;
  bool direct_ = false;
};

class WriteFile {
 public:
  enum class Mode { kCreate, kReopen };  // kReopen continues a file that an interrupted run left

  // Sets the size at once; bytes that are never written read as zero. A symbolic link is not
  // followed: Error(kIo).
  WriteFile(std::filesystem::path path, std::int64_t size, Mode mode = Mode::kCreate);

  const std::filesystem::path& path() const { return path_; }
  void write_at(std::int64_t offset, std::span<const std::byte> from) const;
  void sync() const;  // fsync

  // Gives the room of whole pages back: they read as zero. Where the file system cannot, nothing
  // happens.
  void discard(std::int64_t offset, std::int64_t size) const;

 private:
  std::filesystem::path path_;
  Descriptor fd_;
};

// Raises the number of files that this process may have open, as far as the system lets it, so that
// `count` more can be.
void allow_open_files(std::size_t count);

// Small files, whole.
std::string read_text(const ReadFile& file, std::int64_t limit = std::int64_t{1} << 30);
std::string read_text(const std::filesystem::path& path,
                      std::int64_t limit = std::int64_t{1} << 30);
void write_text(const std::filesystem::path& path, std::string_view text);  // and fsync

// Replaces a file, or makes it, atomically and durably: a symbolic link at `path` is replaced, not
// followed. It keeps the permissions of a file that was there; a new one has those of `mode` that
// the umask leaves.
void replace_text(const std::filesystem::path& path, std::string_view text, unsigned mode = 0644);

void sync_directory(const std::filesystem::path& path);

// The name of the last system error, for messages: "No space left on device".
std::string system_error_text(int error);

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace ferry::distckpt
