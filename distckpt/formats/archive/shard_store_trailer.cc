#include "distckpt/formats/archive/shard_store_trailer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"

namespace ferry::distckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written in place");

constexpr std::string_view kTrailerMagic = "FerryH51";

struct Tail {
  std::uint64_t num_chunks = 0;
  std::uint64_t num_gaps = 0;
  std::uint64_t index_begin = 0;
  std::uint64_t index_end = 0;
  std::uint32_t crc = 0;  // of the trailer before this field
  std::uint32_t zero = 0;
  char magic[8] = {};
};
constexpr std::int64_t kTailBytes = 48;
constexpr std::int64_t kPlaceBytes = 16;
constexpr std::int64_t kCrcBytes = 4;
constexpr std::size_t kCrcAt = 32;  // in the tail
static_assert(sizeof(Tail) == kTailBytes && sizeof(ChunkPlace) == kPlaceBytes);

// The file is not shorter.
Tail read_tail(const ReadFile& file) {
  Tail tail;
  file.read_at(file.size() - kTailBytes, std::as_writable_bytes(std::span(&tail, 1)));
  return tail;
}

bool has_magic(const Tail& tail) {
  return std::string_view(tail.magic, sizeof tail.magic) == kTrailerMagic && tail.zero == 0;
}

std::uint32_t checksum_range(const ReadFile& file, const ByteRange& range) {
  std::vector<std::byte> buffer(
      static_cast<std::size_t>(std::min<std::int64_t>(range.size(), std::int64_t{1} << 20)));
  std::uint32_t crc = 0;
  for (auto at = range.begin; at < range.end;) {
    const auto part = std::span(buffer).first(static_cast<std::size_t>(
        std::min<std::int64_t>(range.end - at, static_cast<std::int64_t>(buffer.size()))));
    file.read_at(at, part);
    crc = crc32(part, crc);
    at += static_cast<std::int64_t>(part.size());
  }
  return crc;
}

// The ranges between and around the chunks, up to `end`. Nothing if chunks overlap, are empty or
// end behind it.
std::optional<std::vector<ByteRange>> gaps_between(std::vector<ChunkPlace> chunks,
                                                   std::int64_t end) {
  std::ranges::sort(chunks, {}, &ChunkPlace::offset);
  std::vector<ByteRange> gaps;
  std::int64_t at = 0;
  for (const auto& chunk : chunks) {
    if (chunk.offset < at || chunk.size == 0 || chunk.size > end - chunk.offset)
      return std::nullopt;
    if (chunk.offset > at) gaps.push_back({.begin = at, .end = chunk.offset});
    at = chunk.end();
  }
  if (end > at) gaps.push_back({.begin = at, .end = end});
  return gaps;
}

void append(const std::filesystem::path& path, std::string_view bytes) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  require(static_cast<bool>(file), ErrorKind::kIo, "{}: cannot be opened: {}", path.string(),
          system_error_text(errno));
  while (!bytes.empty()) {
    const auto written = ::write(file.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    require(written > 0, ErrorKind::kIo, "{}: cannot be written: {}", path.string(),
            system_error_text(errno));
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  require(::fsync(file.get()) == 0, ErrorKind::kIo, "{}: cannot be synced: {}", path.string(),
          system_error_text(errno));
}

}  // namespace

Digest append_trailer(const std::filesystem::path& path,
                      const std::vector<ChunkPlace>& chunks,
                      const ByteRange& index) {
  std::string trailer(reinterpret_cast<const char*>(chunks.data()),
                      chunks.size() * sizeof(ChunkPlace));
  Tail tail{.num_chunks = chunks.size(),
            .index_begin = static_cast<std::uint64_t>(index.begin),
            .index_end = static_cast<std::uint64_t>(index.end)};
  {
    const ReadFile file(path);
    const auto gaps = gaps_between(chunks, file.size());
    require(gaps.has_value(), ErrorKind::kBug, "{}: chunks overlap", path.string());
    for (const auto& gap : *gaps) {
      const auto crc = checksum_range(file, gap);
      trailer.append(reinterpret_cast<const char*>(&crc), sizeof crc);
    }
    tail.num_gaps = gaps->size();
  }
  tail.crc = crc32(std::as_bytes(std::span(&tail, 1)).first(kCrcAt), crc32(as_bytes(trailer)));
  std::ranges::copy(kTrailerMagic, tail.magic);
  trailer.append(reinterpret_cast<const char*>(&tail), sizeof tail);
  append(path, trailer);
  return digest_block(as_bytes(trailer));
}

ShardStoreTrailer read_trailer(const ReadFile& file) {
  const auto name = file.path().string();
  const auto refuse = [&](std::int64_t byte, std::string_view what) {
    throw Error(ErrorKind::kCorrupt, fmt::format("{}: byte {}: {}", name, byte, what),
                "the file may be cut short, or another program may have rewritten it");
  };
  if (file.size() < kTailBytes) refuse(file.size(), "the file ends before its trailer");
  const auto tail_begin = file.size() - kTailBytes;
  const auto tail = read_tail(file);
  if (!has_magic(tail)) refuse(tail_begin, "the file does not end with its trailer");
  if (tail.num_chunks > static_cast<std::uint64_t>(tail_begin / kPlaceBytes) ||
      tail.num_gaps > tail.num_chunks + 1) {
    refuse(tail_begin, "the trailer has more entries than the file has room for");
  }
  const auto table_bytes = static_cast<std::int64_t>(tail.num_chunks) * kPlaceBytes;
  const auto crcs_bytes = static_cast<std::int64_t>(tail.num_gaps) * kCrcBytes;
  ShardStoreTrailer trailer{.begin = tail_begin - table_bytes - crcs_bytes,
                            .chunks = std::vector<ChunkPlace>(tail.num_chunks),
                            .index = {},
                            .digest = {}};
  if (trailer.begin < 0) refuse(tail_begin, "the trailer has more entries than the file");
  std::string bytes(static_cast<std::size_t>(file.size() - trailer.begin), '\0');
  file.read_at(trailer.begin, std::as_writable_bytes(std::span(bytes)));
  const auto covered = bytes.size() - sizeof tail + kCrcAt;
  if (crc32(as_bytes(bytes).first(covered)) != tail.crc)
    refuse(trailer.begin, "the trailer does not have the CRC-32 that it states");
  trailer.digest = digest_block(as_bytes(bytes));
  std::memcpy(trailer.chunks.data(), bytes.data(), static_cast<std::size_t>(table_bytes));
  const auto gaps = gaps_between(trailer.chunks, trailer.begin);
  if (!gaps || gaps->size() != tail.num_gaps)
    refuse(trailer.begin, "the trailer's chunks do not lie in the file, apart from each other");
  const auto end = static_cast<std::uint64_t>(trailer.begin);
  if (tail.index_end > end || tail.index_begin > tail.index_end)
    refuse(tail_begin, "the index does not lie in the file");
  trailer.index = {.begin = static_cast<std::int64_t>(tail.index_begin),
                   .end = static_cast<std::int64_t>(tail.index_end)};
  for (std::size_t i = 0; i < gaps->size(); ++i) {
    std::uint32_t stated = 0;
    std::memcpy(&stated, bytes.data() + table_bytes + static_cast<std::int64_t>(i) * kCrcBytes,
                sizeof stated);
    const auto& gap = (*gaps)[i];
    const auto found = checksum_range(file, gap);
    require(
        found == stated, ErrorKind::kCorrupt,
        "{}: bytes {} to {}, which hold HDF5's structures, the index or small files, have CRC-32 "
        "{:08x}, the trailer says {:08x}",
        name, gap.begin, gap.end, found, stated);
  }
  return trailer;
}

bool is_shard_store_file(const std::filesystem::path& path) {
  const ReadFile file(path);
  return file.size() >= kTailBytes && has_magic(read_tail(file));
}

}  // namespace ferry::distckpt
