#include "distckpt/formats/safetensors.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {
namespace {

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;  // as the safetensors library
constexpr std::string_view kMetadata = "__metadata__";

std::uint64_t load_u64(std::string_view bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i)
    value = value << 8 | static_cast<std::uint8_t>(bytes[static_cast<std::size_t>(i)]);
  return value;
}

std::string store_u64(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xFF));
  return bytes;
}

// The entry of a tensor, whose bytes are [begin, end) of the data. Headers have hundreds of
// thousands of entries: `source` and the name are put together where one is at fault alone.
SafetensorsEntry make_entry(std::string name,
                            std::string_view dtype_name,
                            const Shape& shape,
                            std::int64_t begin,
                            std::int64_t end,
                            std::string_view source) {
  const auto dtype = dtype_from_safetensors(dtype_name);
  require(dtype.has_value(), ErrorKind::kCorrupt, "{}: {}: unknown dtype \"{}\"", source, name,
          dtype_name);
  const auto volume = checked_volume(shape);
  std::int64_t bytes = 0;
  if (!volume || __builtin_mul_overflow(*volume, size_of(*dtype), &bytes))
    fail(ErrorKind::kCorrupt, "{}: {}: the shape {} overflows", source, name, to_string(shape));
  if (end < begin || end - begin != bytes) {
    fail(ErrorKind::kCorrupt, "{}: {}: bytes {} to {} are given, but {} of shape {} takes {} bytes",
         source, name, begin, end, dtype_name, to_string(shape), bytes);
  }
  return {.name = std::move(name), .dtype = *dtype, .shape = shape, .begin = begin, .end = end};
}

SafetensorsEntry parse_entry(std::string name,
                             const nlohmann::json& value,
                             std::string_view source) {
  const auto where = fmt::format("{}: {}", source, name);
  const auto dtype_name = json_string_at(value, "dtype", where);
  const auto shape = json_dims_at(value, "shape", where);
  const auto offsets = json_dims_at(value, "data_offsets", where);
  require(offsets.rank() == 2, ErrorKind::kCorrupt, "{}: data_offsets is not a pair", where);
  require(value.size() == 3, ErrorKind::kCorrupt,
          "{}: has other fields than dtype, shape and data_offsets", where);
  return make_entry(std::move(name), dtype_name, shape, offsets[0], offsets[1], source);
}

// Reads a header as the safetensors library and this program write it, at ten times the speed of a
// parser of JSON: without blanks, `dtype`, `shape` and `data_offsets` in this order, names of plain
// ASCII. Says of any other text that it is another, whatever is the matter with it.
class PlainHeader {
 public:
  PlainHeader(std::string_view text, std::string_view source) : rest_(text), source_(source) {}

  // False: the text is another. Throws Error(kCorrupt) as make_entry() and `check` do.
  template <typename Check>
  bool read(SafetensorsHeader& header, Check&& check) {
    if (rest_.find('\0') != std::string_view::npos || !skip("{\"")) return false;
    bool has_metadata = false;
    do {
      const auto name = string();
      if (!name) return false;
      if (*name == kMetadata) {
        if (std::exchange(has_metadata, true) || !metadata(header.metadata)) return false;
        continue;
      }
      if (!skip(":{\"dtype\":\"")) return false;
      const auto dtype = string();
      if (!dtype || !skip(",\"shape\":[")) return false;
      const auto shape = dims();
      if (!shape || !skip(",\"data_offsets\":[")) return false;
      const auto offsets = dims();
      if (!offsets || offsets->rank() != 2 || !skip("}")) return false;
      if (header.entries.size() == kMaxEntries) return false;
      check(header.entries.emplace_back(
          make_entry(std::string(*name), *dtype, *shape, (*offsets)[0], (*offsets)[1], source_)));
    } while (skip(",\""));
    return skip("}") && rest_.find_first_not_of(' ') == std::string_view::npos;
  }

 private:
  static constexpr std::size_t kMaxEntries = 400'000;  // beyond, the parser counts the memory
  static constexpr std::size_t kMaxDigits = 18;        // of an int64, whatever they are

  bool skip(std::string_view word) {
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  // The rest of a string and its quote.
  std::optional<std::string_view> string() {
    const auto* const end = std::ranges::find_if(
        rest_, [](char c) { return c == '"' || c == '\\' || c < 0x20 || c > 0x7E; });
    if (end == rest_.end() || *end != '"') return std::nullopt;
    const auto text = rest_.substr(0, static_cast<std::size_t>(end - rest_.begin()));
    rest_.remove_prefix(text.size() + 1);
    return text;
  }

  // The rest of a list of numbers and its bracket.
  std::optional<Dims> dims() {
    Dims dims;
    if (skip("]")) return dims;
    do {
      const auto digits = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
      if (digits == 0 || digits > kMaxDigits || dims.rank() == kMaxRank) return std::nullopt;
      if (digits > 1 && rest_.front() == '0') return std::nullopt;
      std::int64_t value = 0;
      for (const char digit : rest_.substr(0, digits)) value = 10 * value + (digit - '0');
      dims.push_back(value);
      rest_.remove_prefix(digits);
    } while (skip(","));
    if (!skip("]")) return std::nullopt;
    return dims;
  }

  bool metadata(std::map<std::string, std::string>& metadata) {
    if (!skip(":{")) return false;
    if (skip("}")) return true;
    do {
      const auto key = skip("\"") ? string() : std::nullopt;
      const auto value = key && skip(":\"") ? string() : std::nullopt;
      if (!value || !metadata.emplace(*key, *value).second) return false;
    } while (skip(","));
    return skip("}");
  }

  std::string_view rest_;
  std::string_view source_;
};

void require_names_once(const std::vector<SafetensorsEntry>& entries, std::string_view source) {
  std::unordered_set<std::string_view> names;
  names.reserve(entries.size());
  for (const auto& entry : entries) {
    require(names.insert(entry.name).second, ErrorKind::kCorrupt, "{}: the key \"{}\" occurs twice",
            source, entry.name);
  }
}

std::int64_t header_length(std::string_view first_bytes,
                           std::int64_t available,
                           std::string_view source) {
  const auto length = load_u64(first_bytes);
  require(length <= static_cast<std::uint64_t>(available), ErrorKind::kCorrupt,
          "{}: byte 0: the header is said to be {} bytes long, but {} bytes follow", source, length,
          available);
  require(length <= static_cast<std::uint64_t>(kMaxHeaderBytes), ErrorKind::kCorrupt,
          "{}: byte 0: a header of {} bytes is larger than the {} that safetensors allows", source,
          length, kMaxHeaderBytes);
  return static_cast<std::int64_t>(length);
}

// The dtypes in the order in which the safetensors library sorts them (its enum Dtype).
constexpr std::array kDTypeOrder{DType::kBool,   DType::kU8,     DType::kI8,  DType::kF8E5M2,
                                 DType::kF8E4M3, DType::kF8E8M0, DType::kI16, DType::kF16,
                                 DType::kBF16,   DType::kI32,    DType::kF32, DType::kF64,
                                 DType::kI64};

std::ptrdiff_t dtype_rank(DType dtype) {
  return std::ranges::find(kDTypeOrder, dtype) - kDTypeOrder.begin();
}

}  // namespace

SafetensorsHeader parse_safetensors_prefix(std::string prefix,
                                           std::string filename,
                                           std::string_view source,
                                           std::int64_t file_size) {
  const auto size = static_cast<std::int64_t>(prefix.size());
  require(size >= kLengthBytes, ErrorKind::kCorrupt, "{}: only {} bytes long", source, size);
  const auto length = header_length(prefix, size - kLengthBytes, source);
  require(length == size - kLengthBytes, ErrorKind::kCorrupt,
          "{}: the header is {} bytes long, but {} bytes are there", source, length,
          size - kLengthBytes);
  SafetensorsHeader header{.filename = std::move(filename),
                           .prefix = std::move(prefix),
                           .metadata = {},
                           .entries = {},
                           .file_size = 0};
  const auto require_inside = [&](const SafetensorsEntry& entry) {
    require(entry.end <= file_size - size, ErrorKind::kCorrupt,
            "{}: {}: ends at byte {} of the data, which is {} bytes long", source, entry.name,
            entry.end, file_size - size);
  };
  bool has_metadata = false;
  const auto read_member = [&](std::string& name, const nlohmann::json& value) {
    if (name != kMetadata) {
      require_inside(header.entries.emplace_back(parse_entry(std::move(name), value, source)));
      return;
    }
    require(!std::exchange(has_metadata, true), ErrorKind::kCorrupt,
            "{}: the key \"{}\" occurs twice", source, kMetadata);
    require(value.is_object(), ErrorKind::kCorrupt, "{}: {} is not an object", source, kMetadata);
    for (const auto& [key, text] : value.items()) {
      header.metadata.emplace(key, json_string(text, key, source));
    }
  };
  const auto text = std::string_view(header.prefix).substr(kLengthBytes);
  if (!PlainHeader(text, source).read(header, require_inside)) {
    header.metadata.clear();
    header.entries.clear();
    visit_json_members(text, source, read_member);
  }
  require_names_once(header.entries, source);
  const auto order = [](const SafetensorsEntry& entry) {
    return std::tuple(entry.begin, entry.end, std::string_view(entry.name));
  };
  if (!std::ranges::is_sorted(header.entries, {}, order))
    std::ranges::sort(header.entries, {}, order);
  std::int64_t position = 0;
  for (auto& entry : header.entries) {
    require(entry.begin == position, ErrorKind::kCorrupt,
            "{}: {}: begins at byte {} of the data, but the tensor before it ends at {}", source,
            entry.name, entry.begin, position);
    position = entry.end;
    require(!__builtin_add_overflow(position, size, &header.file_size), ErrorKind::kCorrupt,
            "{}: {}: the tensors' sizes overflow", source, entry.name);
    entry.begin += size;
    entry.end += size;
  }
  header.file_size = position + size;
  return header;
}

SafetensorsHeader read_safetensors_header(const std::filesystem::path& path) {
  const ReadFile file(path);
  const auto source = path.string();
  require(file.size() >= kLengthBytes, ErrorKind::kCorrupt, "{}: only {} bytes long", source,
          file.size());
  std::string prefix(kLengthBytes, '\0');
  file.read_at(0, std::as_writable_bytes(std::span(prefix)));
  const auto length = header_length(prefix, file.size() - kLengthBytes, source);
  prefix.resize(static_cast<std::size_t>(kLengthBytes + length));
  file.read_at(0, std::as_writable_bytes(std::span(prefix)));
  auto header =
      parse_safetensors_prefix(std::move(prefix), path.filename().string(), source, file.size());
  const auto& last = header.entries;
  require(header.file_size == file.size(), ErrorKind::kCorrupt,
          "{}: {} bytes long, but its last tensor{} ends at byte {}", source, file.size(),
          last.empty() ? "" : " " + last.back().name, header.file_size);
  return header;
}

SafetensorsHeader make_safetensors_header(std::string filename,
                                          std::vector<SafetensorsEntry> tensors,
                                          std::map<std::string, std::string> metadata) {
  std::ranges::sort(tensors, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    const auto rank_a = dtype_rank(a.dtype);
    const auto rank_b = dtype_rank(b.dtype);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  std::string text = "{";
  if (!metadata.empty()) {
    text += fmt::format("\"{}\":{}", kMetadata, nlohmann::json(metadata).dump());
  }
  std::int64_t position = 0;
  for (auto& tensor : tensors) {
    tensor.begin = position;
    position += tensor.shape.product() * size_of(tensor.dtype);
    tensor.end = position;
    text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        text.size() > 1 ? "," : "", nlohmann::json(tensor.name).dump(),
                        safetensors_name(tensor.dtype),
                        fmt::join(tensor.shape.begin(), tensor.shape.end(), ","), tensor.begin,
                        tensor.end);
  }
  text += "}";
  while (text.size() % 8 != 0) text += ' ';
  const auto size = kLengthBytes + static_cast<std::int64_t>(text.size());
  for (auto& tensor : tensors) {
    tensor.begin += size;
    tensor.end += size;
  }
  return {.filename = std::move(filename),
          .prefix = store_u64(text.size()) + text,
          .metadata = std::move(metadata),
          .entries = std::move(tensors),
          .file_size = size + position};
}

void add_to_layout(const SafetensorsHeader& header,
                   const std::filesystem::path& folder,
                   Layout& layout) {
  const auto storage =
      layout.add_storage(FileStorage{.path = folder / header.filename, .size = header.file_size});
  for (const auto& entry : header.entries) {
    with_context([&] { return fmt::format("reading {}", (folder / header.filename).string()); },
                 [&] {
                   layout.add_tensor({.name = entry.name,
                                      .dtype = entry.dtype,
                                      .shape = entry.shape,
                                      .shards = {packed_shard(Box::whole(entry.shape), entry.dtype,
                                                              storage, entry.begin)}});
                 });
  }
}

}  // namespace ferry::distckpt
