#include "trainer/data/jsonl_file.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"

namespace ferry::trainer {
namespace {

constexpr std::int64_t kScanBytes = std::int64_t{1} << 20;
constexpr std::int64_t kLongestLine = std::int64_t{256} << 20;

struct ChunkPlace {
  std::int64_t offset = 0;      // in the file
  std::int64_t first_line = 0;  // counted from 1, as editors do
};

bool is_blank(std::string_view line) {
  return line.empty() || line == "\r";  // as lines of DOS end
}

// The end of a line as a scan meets it. Only its length and first byte are kept of it: it may be
// longer than the block that is scanned.
struct OpenLine {
  std::int64_t begin = 0;
  char first = 0;
};

class JsonlChunk : public Chunk {
 public:
  JsonlChunk(std::string text, std::int64_t first_line) : text_(std::move(text)) {
    auto number = first_line;
    for (std::size_t begin = 0; begin < text_.size(); ++number) {
      const auto end = std::min(text_.find('\n', begin), text_.size());
      const auto line = std::string_view(text_).substr(begin, end - begin);
      if (!is_blank(line)) lines_.push_back({.text = line, .number = number});
      begin = end + 1;
    }
  }

  std::size_t size() const { return lines_.size(); }

  Record at(std::int64_t row) const override {
    const auto& line = lines_.at(static_cast<std::size_t>(row));
    auto record = distckpt::parse_ordered_json(line.text, "its text");
    require(record.is_object(), ErrorKind::kCorrupt, "its text: is a JSON {}, not an object",
            record.type_name());
    return record;
  }

  std::string where(std::int64_t row) const override {
    return fmt::format("line {}", lines_.at(static_cast<std::size_t>(row)).number);
  }

 private:
  struct Line {
    std::string_view text{};  // of text_
    std::int64_t number = 0;
  };

  std::string text_;
  std::vector<Line> lines_;
};

class JsonlFile : public RecordFile {
 public:
  explicit JsonlFile(const std::filesystem::path& path) : file_(path) { scan(); }

  const std::filesystem::path& path() const override { return file_.path(); }
  std::int64_t file_bytes() const override { return file_.size(); }
  const std::vector<ChunkSize>& chunks() const override { return chunks_; }

  std::unique_ptr<Chunk> open(std::size_t chunk) const override {
    const auto& place = places_.at(chunk);
    std::string text(static_cast<std::size_t>(chunks_[chunk].num_bytes), '\0');
    file_.read_at(place.offset, std::as_writable_bytes(std::span(text)));
    auto opened = std::make_unique<JsonlChunk>(std::move(text), place.first_line);
    require(std::cmp_equal(opened->size(), chunks_[chunk].num_records), ErrorKind::kIo,
            "{}: was changed while it was being read", path().string());
    return opened;
  }

 private:
  void scan() {
    std::vector<char> block(static_cast<std::size_t>(std::min(kScanBytes, file_.size())));
    OpenLine line;
    for (std::int64_t offset = 0; offset < file_.size();) {
      const auto count = std::min(kScanBytes, file_.size() - offset);
      const std::span bytes(block.data(), static_cast<std::size_t>(count));
      file_.read_at(offset, std::as_writable_bytes(bytes));
      scan_block(bytes, offset, line);
      offset += count;
    }
    if (line.begin < file_.size()) end_line(line, file_.size());
    if (open_.num_records > 0) end_chunk(file_.size());
  }

  void scan_block(std::span<const char> bytes, std::int64_t offset, OpenLine& line) {
    const auto* at = bytes.data();
    const auto* const end = at + bytes.size();
    while (at < end) {
      if (offset + (at - bytes.data()) == line.begin) line.first = *at;
      const auto* newline =
          static_cast<const char*>(std::memchr(at, '\n', static_cast<std::size_t>(end - at)));
      if (newline == nullptr) return;
      const auto stop = offset + (newline - bytes.data());
      end_line(line, stop);
      line.begin = stop + 1;
      at = newline + 1;
    }
  }

  // `end` is where its newline lies, or the end of the file.
  void end_line(const OpenLine& line, std::int64_t end) {
    const auto length = end - line.begin;
    require(length <= kLongestLine, ErrorKind::kCorrupt,
            "{}: line {} is longer than {} bytes: this is no JSONL", path().string(),
            num_lines_ + 1, kLongestLine);
    ++num_lines_;
    if (length > 1 || (length == 1 && line.first != '\r')) ++open_.num_records;
    if (open_.num_records >= kJsonlChunkRecords || end - place_.offset >= kJsonlChunkBytes)
      end_chunk(std::min(end + 1, file_.size()));
  }

  void end_chunk(std::int64_t end) {
    open_.num_bytes = end - place_.offset;
    chunks_.push_back(open_);
    places_.push_back(place_);
    open_ = {};
    place_ = {.offset = end, .first_line = num_lines_ + 1};
  }

  distckpt::ReadFile file_;
  std::vector<ChunkSize> chunks_;
  std::vector<ChunkPlace> places_;
  ChunkSize open_{};  // the chunk that the scan is in
  ChunkPlace place_{.offset = 0, .first_line = 1};
  std::int64_t num_lines_ = 0;
};

}  // namespace

std::unique_ptr<RecordFile> open_jsonl_file(const std::filesystem::path& path) {
  return std::make_unique<JsonlFile>(path);
}

}  // namespace ferry::trainer
