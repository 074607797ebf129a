#include "distckpt/execute/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {
namespace {

// The file: magic, fingerprint, then records. A record: length of its body (8 bytes), body, digest
// of the body.
constexpr std::string_view kJournalMagic = "ferry-journal-1\n";

template <typename T>
void put_native(std::string& text, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  text.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
void put_all(std::string& text, const std::vector<T>& values) {
  put_native(text, static_cast<std::uint64_t>(values.size()));
  text.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Reads what put_native wrote; false once the text is too short.
class JournalReader {
 public:
  explicit JournalReader(std::string_view text) : text_(text) {}

  template <typename T>
  bool get(T& value) {
    if (text_.size() < sizeof(value)) return false;
    std::memcpy(&value, text_.data(), sizeof(value));
    text_.remove_prefix(sizeof(value));
    return true;
  }

  template <typename T>
  bool get_all(std::vector<T>& values) {
    std::uint64_t count = 0;
    if (!get(count) || count > text_.size() / sizeof(T)) return false;
    if (count == 0) return true;
    values.resize(count);
    std::memcpy(values.data(), text_.data(), count * sizeof(T));
    text_.remove_prefix(count * sizeof(T));
    return true;
  }

  std::optional<std::string_view> take(std::size_t size) {
    if (text_.size() < size) return std::nullopt;
    const auto part = text_.substr(0, size);
    text_.remove_prefix(size);
    return part;
  }

 private:
  std::string_view text_;
};

std::optional<TaskRecord> parse_record(std::string_view body) {
  TaskRecord record;
  JournalReader reader(body);
  if (!reader.get(record.task) || !reader.get_all(record.blocks) || !reader.get_all(record.read) ||
      !reader.get_all(record.written)) {
    return std::nullopt;
  }
  return record;
}

void write_fully(int fd, const std::filesystem::path& path, std::string_view text) {
  while (!text.empty()) {
    const auto count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    require(count >= 0, ErrorKind::kIo, "{}: cannot be written: {}", path.string(),
            system_error_text(errno));
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace

Journal::Journal(std::filesystem::path path,
                 const Digest& fingerprint,
                 bool resume,
                 const std::vector<std::filesystem::path>& others)
    : path_(std::move(path)) {
  std::string header(kJournalMagic);
  put_native(header, fingerprint);
  const auto keep = resume ? take_records(path_, header) : 0;
  for (const auto& other : others) take_records(other, header);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  require(fd_ >= 0, ErrorKind::kIo, "{}: cannot be created: {}", path_.string(),
          system_error_text(errno));
  require(::ftruncate(fd_, keep) == 0 && ::lseek(fd_, 0, SEEK_END) >= 0, ErrorKind::kIo,
          "{}: cannot be cut: {}", path_.string(), system_error_text(errno));
  if (keep == 0) write_fully(fd_, path_, header);
}

std::int64_t Journal::take_records(const std::filesystem::path& path, std::string_view header) {
  if (!std::filesystem::exists(path)) return 0;
  const auto text = read_text(path);
  if (text.size() < header.size()) return 0;
  if (!text.starts_with(header)) {
    throw Error(
        ErrorKind::kUsage,
        fmt::format("{}: the interrupted run had another source or other options", path.string()),
        "run it with the same ones, or without --resume to start anew");
  }
  JournalReader reader(std::string_view(text).substr(header.size()));
  auto whole = static_cast<std::int64_t>(header.size());
  std::uint64_t length = 0;
  Digest digest;
  while (reader.get(length)) {
    const auto body = reader.take(length);
    if (!body || !reader.get(digest) || digest != digest_block(as_bytes(*body))) break;
    auto record = parse_record(*body);
    if (!record) break;
    whole += static_cast<std::int64_t>(sizeof(length) + length + sizeof(digest));
    finished_.insert_or_assign(record->task, std::move(*record));
  }
  return whole;
}

Journal::~Journal() {
  if (fd_ >= 0) ::close(fd_);
}

const TaskRecord* Journal::finished(std::uint32_t task) const {
  const auto found = finished_.find(task);
  return found == finished_.end() ? nullptr : &found->second;
}

void Journal::keep_only(const std::function<bool(std::uint32_t)>& keep) {
  std::erase_if(finished_, [&](const auto& record) { return !keep(record.first); });
}

void Journal::append(const TaskRecord& record) {
  std::string body;
  put_native(body, record.task);
  put_all(body, record.blocks);
  put_all(body, record.read);
  put_all(body, record.written);
  std::string text;
  put_native(text, static_cast<std::uint64_t>(body.size()));
  text += body;
  put_native(text, digest_block(as_bytes(body)));
  const std::lock_guard lock(mutex_);
  write_fully(fd_, path_, text);
}

}  // namespace ferry::distckpt
