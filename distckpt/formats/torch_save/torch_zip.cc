#include "distckpt/formats/torch_save/torch_zip.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/torch_tensor.h"
#include "distckpt/formats/torch_save/zip_format.h"

namespace ferry::distckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "zip headers are decoded in place");

constexpr std::int64_t kWindow = 4'096;  // bytes read at either end of an archive
constexpr std::string_view kPickleRecord = "data.pkl";
constexpr std::int64_t kMaxSmallRecord = std::int64_t{1} << 30;

std::string read_text_at(const ReadFile& file, std::int64_t offset, std::int64_t size) {
  std::string text(static_cast<std::size_t>(size), '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

void require_crc32(std::string_view bytes, const TorchRecord& record, std::string_view source) {
  const std::uint32_t crc32 = distckpt::crc32(as_bytes(bytes));
  require(record.crc32 == 0 || crc32 == record.crc32, ErrorKind::kCorrupt,
          "{}: record {} at byte {}: CRC-32 {:08x}, expected {:08x}", source, record.name,
          record.offset, crc32, record.crc32);
}

// Little-endian fields, one after the other. The caller makes sure that there are enough bytes.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T next() {
    T value = 0;
    std::memcpy(&value, bytes_.data() + position_, sizeof value);
    position_ += sizeof value;
    return value;
  }
  std::uint16_t u16() { return next<std::uint16_t>(); }
  std::uint32_t u32() { return next<std::uint32_t>(); }
  std::uint64_t u64() { return next<std::uint64_t>(); }
  std::string_view text(std::size_t count) {
    position_ += count;
    return bytes_.substr(position_ - count, count);
  }
  Fields& skip(std::size_t count) {
    position_ += count;
    return *this;
  }
  std::size_t left() const { return bytes_.size() - position_; }

 private:
  std::string_view bytes_;
  std::size_t position_ = 0;
};

// The part of a header's extra field in ZIP64 form. Nothing if there is none, or it is broken.
std::optional<std::string_view> find_zip64(std::string_view extra) {
  Fields fields(extra);
  while (fields.left() >= 4) {
    const std::uint16_t id = fields.u16();
    const std::uint16_t bytes = fields.u16();
    if (bytes > fields.left()) break;
    const std::string_view content = fields.text(bytes);
    if (id == zip::kZip64Extra) return content;
  }
  return std::nullopt;
}

// Fills in the fields that did not fit into 32 bits. False if `zip64` holds more or less than
// those.
bool widen(std::string_view zip64, std::initializer_list<std::uint64_t*> fields) {
  Fields wide(zip64);
  for (std::uint64_t* field : fields) {
    if (*field != zip::kMax32) continue;
    if (wide.left() < 8) return false;
    *field = wide.u64();
  }
  return wide.left() == 0;
}

// An entry of the central directory.
struct Entry {
  std::string_view path;  // "archive/data.pkl"
  std::uint16_t flags = 0;
  std::uint32_t crc32 = 0;
  std::int64_t size = 0;
  std::int64_t header = 0;  // where its local header stands, in the archive
  bool has_zip64 = false;
};

// Positions are relative to the archive.
class ArchiveReader {
 public:
  ArchiveReader(const ReadFile& file, std::int64_t offset, std::int64_t length)
      : file_(file), offset_(offset), length_(length) {
    require(offset >= 0 && length >= 0 && offset <= file.size() && length <= file.size() - offset,
            ErrorKind::kCorrupt, "{}: ends at byte {}, inside the archive of {} bytes at byte {}",
            source(), file.size(), length, offset);
    // Both ends hold all headers of an archive of one tensor; the pickle is at the front.
    if (length <= 2 * kWindow) {
      head_ = read_text_at(file, offset, length);
    } else {
      head_ = read_text_at(file, offset, kWindow);
      tail_ = read_text_at(file, offset + length - kWindow, kWindow);
    }
  }

  TorchArchive read();

  // Valid until the next call.
  std::string_view view(std::int64_t position, std::int64_t count) {
    const auto within = [&](const std::string& window, std::int64_t first) {
      return position >= first &&
             position + count <= first + static_cast<std::int64_t>(window.size());
    };
    const std::int64_t tail = length_ - static_cast<std::int64_t>(tail_.size());
    if (within(head_, 0)) return part(head_, position, count);
    if (within(tail_, tail)) return part(tail_, position - tail, count);
    other_ = read_text_at(file_, offset_ + position, count);
    return other_;
  }

  std::string read_record(const TorchRecord& record);

 private:
  static std::string_view part(const std::string& window, std::int64_t first, std::int64_t count) {
    return std::string_view(window).substr(static_cast<std::size_t>(first),
                                           static_cast<std::size_t>(count));
  }

  struct Directory {
    std::int64_t entries = 0;
    std::int64_t bytes = 0;
    std::int64_t position = 0;
  };
  Directory find_directory();
  Entry parse_entry(std::string_view bytes, std::int64_t position);
  std::int64_t check_local_header(const Entry& entry, std::int64_t limit);
  void check_descriptor(const Entry& entry, std::int64_t position, std::int64_t limit);

  std::string source() const { return file_.path().string(); }

  template <typename... Args>
  void check(bool ok,
             std::int64_t position,
             fmt::format_string<Args...> message,
             Args&&... args) const {
    if (ok) [[likely]]
      return;
    fail(ErrorKind::kCorrupt, "{}: at byte {}: {}", source(), offset_ + position,
         fmt::format(message, std::forward<Args>(args)...));
  }

  const ReadFile& file_;
  const std::int64_t offset_;
  const std::int64_t length_;
  std::string head_;
  std::string tail_;  // empty if the head is all
  std::string other_;
};

ArchiveReader::Directory ArchiveReader::find_directory() {
  check(length_ >= zip::kEndBytes, 0, "an archive of {} bytes", length_);
  const std::int64_t end = length_ - zip::kEndBytes;
  Fields fields(view(end, zip::kEndBytes));
  check(fields.u32() == zip::kEnd, end, "no archive ends here: the end record is missing");
  const std::uint16_t disk = fields.u16();
  const std::uint16_t directory_disk = fields.u16();
  const std::uint16_t entries_here = fields.u16();
  const std::uint16_t entries = fields.u16();
  const std::uint32_t bytes = fields.u32();
  const std::uint32_t position = fields.u32();
  const std::uint16_t comment = fields.u16();
  check(disk == 0 && directory_disk == 0 && entries_here == entries && comment == 0, end,
        "the end record tells of several disks or a comment");

  Directory directory{entries, bytes, position};
  std::int64_t directory_end = end;
  const std::int64_t locator = end - zip::kZip64LocatorBytes;
  if (locator >= 0 && Fields(view(locator, 4)).u32() == zip::kZip64Locator) {
    Fields locator_fields(view(locator, zip::kZip64LocatorBytes));
    locator_fields.skip(4);
    const std::uint32_t end_disk = locator_fields.u32();
    const std::uint64_t zip64 = locator_fields.u64();
    const std::uint32_t disks = locator_fields.u32();
    directory_end = locator - zip::kZip64EndBytes;
    check(end_disk == 0 && disks == 1 && directory_end >= 0 &&
              zip64 == static_cast<std::uint64_t>(directory_end),
          locator,
          "the ZIP64 locator points to byte {} of the archive, not to the record before it", zip64);
    Fields zip64_fields(view(directory_end, zip::kZip64EndBytes));
    const bool is_record = zip64_fields.u32() == zip::kZip64End && zip64_fields.u64() == 44;
    zip64_fields.skip(4);  // versions
    const bool is_one_disk = zip64_fields.u32() == 0 && zip64_fields.u32() == 0;
    const std::uint64_t wide_entries_here = zip64_fields.u64();
    const std::uint64_t wide_entries = zip64_fields.u64();
    const std::uint64_t wide_bytes = zip64_fields.u64();
    const std::uint64_t wide_position = zip64_fields.u64();
    check(is_record && is_one_disk && wide_entries_here == wide_entries, directory_end,
          "no proper ZIP64 end record");
    const auto agrees = [](auto narrow, std::uint64_t wide) {
      return narrow == wide || narrow == std::numeric_limits<decltype(narrow)>::max();
    };
    check(agrees(entries, wide_entries) && agrees(bytes, wide_bytes) &&
              agrees(position, wide_position),
          directory_end, "the ZIP64 end record contradicts the end record");
    const auto limit = static_cast<std::uint64_t>(length_);
    check(wide_entries <= limit && wide_bytes <= limit && wide_position <= limit, directory_end,
          "the central directory leaves the archive");
    directory = {static_cast<std::int64_t>(wide_entries), static_cast<std::int64_t>(wide_bytes),
                 static_cast<std::int64_t>(wide_position)};
  }
  check(directory.position + directory.bytes == directory_end, end,
        "the central directory, {} bytes at byte {} of the archive, does not end where the end "
        "record begins",
        directory.bytes, directory.position);
  return directory;
}

// `bytes` is a whole entry, and the path returned a view into it.
Entry ArchiveReader::parse_entry(std::string_view bytes, std::int64_t position) {
  Fields fields(bytes);
  check(fields.u32() == zip::kCentralEntry, position, "no central directory entry");
  fields.skip(4);  // versions
  Entry entry;
  entry.flags = fields.u16();
  const std::uint16_t method = fields.u16();
  fields.skip(4);  // time
  entry.crc32 = fields.u32();
  std::uint64_t stored = fields.u32();
  std::uint64_t size = fields.u32();
  const std::uint16_t path_bytes = fields.u16();
  const std::uint16_t extra_bytes = fields.u16();
  fields.skip(2);  // length of the comment
  const std::uint16_t disk = fields.u16();
  fields.skip(6);  // attributes
  std::uint64_t local = fields.u32();
  entry.path = fields.text(path_bytes);
  check(std::ranges::none_of(entry.path, [](char c) { return (c >= 0 && c < 0x20) || c == 0x7F; }),
        position, "a record's name has control characters");
  check(method == 0, position, "record {} is compressed (method {})", entry.path, method);
  check((entry.flags & ~(zip::kFlagDescriptor | zip::kFlagUtf8)) == 0 && disk == 0, position,
        "record {} has flags 0x{:04x}, which torch never sets", entry.path, entry.flags);
  const auto zip64 = find_zip64(fields.text(extra_bytes));
  entry.has_zip64 = zip64.has_value();
  check(widen(zip64.value_or(""), {&size, &stored, &local}), position,
        "record {} has an improper ZIP64 field", entry.path);
  const auto limit = static_cast<std::uint64_t>(length_);
  check(size == stored, position, "record {}: {} bytes, stored as {}", entry.path, size, stored);
  check(size <= limit && local <= limit, position, "record {} leaves the archive", entry.path);
  entry.size = static_cast<std::int64_t>(size);
  entry.header = static_cast<std::int64_t>(local);
  return entry;
}

// Returns where the payload begins.
std::int64_t ArchiveReader::check_local_header(const Entry& entry, std::int64_t limit) {
  const std::int64_t at = entry.header;
  check(at <= limit - zip::kLocalHeaderBytes, at, "record {} leaves the archive", entry.path);
  Fields fields(view(at, zip::kLocalHeaderBytes));
  check(fields.u32() == zip::kLocalHeader, at, "no local header of record {}", entry.path);
  fields.skip(2);  // version
  const std::uint16_t flags = fields.u16();
  const std::uint16_t method = fields.u16();
  fields.skip(4);  // time
  const std::uint32_t crc32 = fields.u32();
  std::uint64_t stored = fields.u32();
  std::uint64_t size = fields.u32();
  const std::uint16_t path_bytes = fields.u16();
  const std::uint16_t extra_bytes = fields.u16();
  const std::int64_t payload = at + zip::kLocalHeaderBytes + path_bytes + extra_bytes;
  check(payload <= limit && entry.size <= limit - payload, at,
        "record {}, {} bytes, leaves the archive", entry.path, entry.size);

  Fields rest(view(at + zip::kLocalHeaderBytes, path_bytes + extra_bytes));
  check(rest.text(path_bytes) == entry.path && flags == entry.flags && method == 0, at,
        "the local header of record {} contradicts the central directory", entry.path);
  const bool is_deferred =
      (flags & zip::kFlagDescriptor) != 0 && crc32 == 0 && stored == 0 && size == 0;
  if (is_deferred) return payload;
  if (size == zip::kMax32) {
    check(widen(find_zip64(rest.text(extra_bytes)).value_or(""), {&size, &stored}), at,
          "record {} has an improper ZIP64 field", entry.path);
  }
  const auto expected = static_cast<std::uint64_t>(entry.size);
  check(crc32 == entry.crc32 && stored == expected && size == expected, at,
        "record {}: {} bytes with CRC-32 {:08x} in its local header, {} and {:08x} in the central "
        "directory",
        entry.path, size, crc32, entry.size, entry.crc32);
  return payload;
}

// `position` is where the payload ends.
void ArchiveReader::check_descriptor(const Entry& entry,
                                     std::int64_t position,
                                     std::int64_t limit) {
  const std::int64_t bytes = entry.has_zip64 ? 24 : 16;
  check(bytes <= limit - position, position, "record {} lacks its data descriptor", entry.path);
  Fields fields(view(position, bytes));
  const bool is_descriptor = fields.u32() == zip::kDataDescriptor;
  const std::uint32_t crc32 = fields.u32();
  const std::uint64_t stored = entry.has_zip64 ? fields.u64() : fields.u32();
  const std::uint64_t size = entry.has_zip64 ? fields.u64() : fields.u32();
  const auto expected = static_cast<std::uint64_t>(entry.size);
  check(is_descriptor && crc32 == entry.crc32 && stored == expected && size == expected, position,
        "the data descriptor of record {} contradicts the central directory", entry.path);
}

TorchArchive ArchiveReader::read() {
  const Directory directory = find_directory();
  check(directory.entries <= directory.bytes / zip::kCentralEntryBytes, directory.position,
        "a central directory of {} entries in {} bytes", directory.entries, directory.bytes);

  struct Extent {
    std::int64_t first;
    std::int64_t end;
    std::size_t record;
  };
  TorchArchive archive{.source = source(), .name = {}, .records = {}, .by_name = {}};
  std::vector<Extent> extents;
  std::int64_t position = directory.position;
  const std::int64_t directory_end = directory.position + directory.bytes;
  for (std::int64_t i = 0; i < directory.entries; ++i) {
    check(zip::kCentralEntryBytes <= directory_end - position, position,
          "the central directory is cut");
    Fields sizes(view(position + 28, 6));
    const std::int64_t entry_bytes =
        zip::kCentralEntryBytes + sizes.u16() + sizes.u16() + sizes.u16();
    check(entry_bytes <= directory_end - position, position, "the central directory is cut");
    const std::string whole(view(position, entry_bytes));
    const Entry entry = parse_entry(whole, position);
    position += entry_bytes;

    const auto slash = entry.path.find('/');
    check(slash != std::string_view::npos && slash > 0 && slash + 1 < entry.path.size(), position,
          "record {} is in no folder", entry.path);
    if (i == 0) archive.name = entry.path.substr(0, slash);
    check(entry.path.substr(0, slash) == archive.name, position, "record {} is not in folder {}",
          entry.path, archive.name);

    const std::int64_t payload = check_local_header(entry, directory.position);
    std::int64_t end = payload + entry.size;
    if ((entry.flags & zip::kFlagDescriptor) != 0 && entry.size > 0) {
      check_descriptor(entry, end, directory.position);
      end += entry.has_zip64 ? 24 : 16;
    }
    extents.push_back({entry.header, end, archive.records.size()});
    archive.records.push_back({.name = std::string(entry.path.substr(slash + 1)),
                               .offset = offset_ + payload,
                               .size = entry.size,
                               .crc32 = entry.crc32});
  }
  check(position == directory_end, position, "the central directory has bytes left over");

  std::ranges::sort(extents, {}, &Extent::first);
  for (std::size_t i = 1; i < extents.size(); ++i) {
    check(extents[i - 1].end <= extents[i].first, extents[i].first, "records {} and {} overlap",
          archive.records[extents[i - 1].record].name, archive.records[extents[i].record].name);
  }
  archive.by_name.resize(archive.records.size());
  std::iota(archive.by_name.begin(), archive.by_name.end(), 0U);
  const auto name_of = [&](std::uint32_t i) -> std::string_view { return archive.records[i].name; };
  std::ranges::sort(archive.by_name, {}, name_of);
  const auto twice = std::ranges::adjacent_find(archive.by_name, {}, name_of);
  check(twice == archive.by_name.end(), directory.position, "record {} occurs twice",
        twice == archive.by_name.end() ? "" : name_of(*twice));

  archive.at("version");
  if (const TorchRecord* byteorder = archive.find("byteorder")) {
    check(byteorder->size == 6 && read_record(*byteorder) == "little", byteorder->offset - offset_,
          "the archive is not little endian");
  }
  return archive;
}

std::string ArchiveReader::read_record(const TorchRecord& record) {
  check(record.size <= kMaxSmallRecord, record.offset - offset_,
        "record {} of {} bytes is too large for what it should hold", record.name, record.size);
  std::string bytes(view(record.offset - offset_, record.size));
  require_crc32(bytes, record, source());
  return bytes;
}

}  // namespace

const TorchRecord* TorchArchive::find(std::string_view record) const {
  const auto found = std::ranges::lower_bound(
      by_name, record, {}, [&](std::uint32_t i) -> std::string_view { return records[i].name; });
  return found == by_name.end() || records[*found].name != record ? nullptr : &records[*found];
}

const TorchRecord& TorchArchive::at(std::string_view record) const {
  const TorchRecord* found = find(record);
  require(found != nullptr, ErrorKind::kCorrupt, "{}: archive {} has no record {}", source, name,
          record);
  return *found;
}

TorchArchive read_torch_archive(const ReadFile& file, std::int64_t offset, std::int64_t length) {
  return ArchiveReader(file, offset, length).read();
}

TensorItem parse_tensor_item(const ReadFile& file, std::int64_t offset, std::int64_t length) {
  ArchiveReader reader(file, offset, length);
  const TorchArchive archive = reader.read();
  const TorchRecord& record = archive.at(kPickleRecord);
  const Pickle pickle = Pickle::parse(
      reader.read_record(record),
      {.source = archive.source, .first_byte = record.offset, .allowed_globals = tensor_globals()});
  return parse_tensor(pickle.root(), archive);
}

Pickle read_torch_object(const ReadFile& file,
                         std::int64_t offset,
                         std::int64_t length,
                         std::span<const std::string_view> allowed_globals) {
  ArchiveReader reader(file, offset, length);
  const TorchArchive archive = reader.read();
  const TorchRecord& record = archive.at(kPickleRecord);
  return Pickle::parse(
      reader.read_record(record),
      {.source = archive.source, .first_byte = record.offset, .allowed_globals = allowed_globals});
}

std::string read_torch_record(const ReadFile& file, const TorchRecord& record) {
  require(record.size <= kMaxSmallRecord, ErrorKind::kCorrupt,
          "{}: record {} of {} bytes is too large to read whole", file.path().string(), record.name,
          record.size);
  std::string bytes = read_text_at(file, record.offset, record.size);
  require_crc32(bytes, record, file.path().string());
  return bytes;
}

}  // namespace ferry::distckpt
