#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/formats/torch_save/zip_format.h"

namespace ferry::distckpt {
namespace {

static_assert(std::endian::native == std::endian::little, "zip headers are encoded in place");

template <typename T>
void put(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}
void put16(std::string& out, std::int64_t value) {
  put(out, static_cast<std::uint16_t>(value));
}
void put32(std::string& out, std::int64_t value) {
  put(out, static_cast<std::uint32_t>(value));
}
void put64(std::string& out, std::int64_t value) {
  put(out, static_cast<std::uint64_t>(value));
}
std::int64_t at_most_max32(std::int64_t value) {
  return std::min<std::int64_t>(value, zip::kMax32);
}

// torch's c10::hash_combine.
std::uint64_t hash_combine(std::uint64_t seed, std::uint64_t value) {
  return seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2));
}

// torch.save's PyTorchStreamWriter and the miniz below it: the order of records, their padding and
// their headers.
class ArchiveWriter {
 public:
  explicit ArchiveWriter(std::string_view archive) : archive_(archive) {}

  void add(std::string_view record, std::string_view bytes) {
    begin(record, static_cast<std::int64_t>(bytes.size()));
    out_.append(bytes);
    end(crc32(as_bytes(bytes)));
  }

  // Write the bytes before and behind a payload; between the two it is skipped, or appended to
  // out().
  void begin(std::string_view record, std::int64_t size);
  void skip(std::int64_t size) { skipped_ += size; }
  void end(std::uint32_t crc32);

  // data.pkl and what describes the format; then come the storages.
  void add_pickle(std::string_view data_pkl) {
    add("data.pkl", data_pkl);
    add(".format_version", "1");
    add(".storage_alignment", "64");
    add("byteorder", "little");
  }
  // `names_hash` stands for the names of all records; torch hashes them in the order of a hash
  // table.
  void finish(std::uint64_t names_hash);

  std::string& out() { return out_; }

 private:
  struct Written {
    std::string path;
    std::int64_t header = 0;
    std::int64_t size = 0;
    std::uint32_t crc32 = 0;
    std::string zip64;  // see zip64_extra
  };

  std::int64_t position() const { return static_cast<std::int64_t>(out_.size()) + skipped_; }
  static std::int64_t flags(const Written& record) {
    return record.size > 0 ? zip::kFlagUtf8 | zip::kFlagDescriptor : zip::kFlagUtf8;
  }

  std::string archive_;
  std::string out_;
  std::int64_t skipped_ = 0;
  std::vector<Written> written_;
  std::uint64_t crc32s_hash_ = 0;
};

// The extra field for what does not fit into 32 bits; empty if all does.
std::string zip64_extra(std::int64_t size, std::int64_t stored, std::int64_t header) {
  const bool is_big = size >= zip::kMax32;
  const bool is_far = header >= zip::kMax32;
  std::string extra;
  if (!is_big && !is_far) return extra;
  put16(extra, zip::kZip64Extra);
  put16(extra, (is_big ? 16 : 0) + (is_far ? 8 : 0));
  if (is_big) put64(extra, size);
  if (is_big) put64(extra, stored);
  if (is_far) put64(extra, header);
  return extra;
}

void ArchiveWriter::begin(std::string_view record, std::int64_t size) {
  Written& written = written_.emplace_back();
  written.path = fmt::format("{}/{}", archive_, record);
  written.header = position();
  written.size = size;
  written.zip64 = zip64_extra(size, size, written.header);

  const auto path_bytes = static_cast<std::int64_t>(written.path.size());
  const auto zip64_bytes = static_cast<std::int64_t>(written.zip64.size());
  const std::int64_t unpadded = position() + zip::kLocalHeaderBytes + path_bytes + zip64_bytes + 4;
  const std::int64_t padding = (zip::kAlignment - unpadded % zip::kAlignment) % zip::kAlignment;
  put32(out_, zip::kLocalHeader);
  put16(out_, 0);  // version: torch's miniz says none
  put16(out_, flags(written));
  out_.append(18, '\0');  // method: stored; time; CRC and sizes: see the data descriptor
  put16(out_, path_bytes);
  put16(out_, zip64_bytes + 4 + padding);
  out_.append(written.path);
  out_.append(zip64_extra(size, 0, written.header));  // torch does not know the stored size yet
  put16(out_, zip::kPaddingExtra);
  put16(out_, padding);
  out_.append(static_cast<std::size_t>(padding), 'Z');
}

void ArchiveWriter::end(std::uint32_t crc32) {
  Written& record = written_.back();
  record.crc32 = crc32;
  if (record.size == 0) return;
  crc32s_hash_ = hash_combine(crc32s_hash_, crc32);
  put32(out_, zip::kDataDescriptor);
  put32(out_, crc32);
  for (int i = 0; i < 2; ++i) {
    if (record.zip64.empty()) {
      put32(out_, record.size);
    } else {
      put64(out_, record.size);
    }
  }
}

void ArchiveWriter::finish(std::uint64_t names_hash) {
  add("version", "3\n");
  add(".data/serialization_id", fmt::format("{:020}{:020}", names_hash, crc32s_hash_));

  const std::int64_t directory = position();
  const auto entries = static_cast<std::int64_t>(written_.size());
  for (const auto& record : written_) {
    put32(out_, zip::kCentralEntry);
    put32(out_, 0);  // versions
    put16(out_, flags(record));
    put16(out_, 0);  // method: stored
    put32(out_, 0);  // time
    put32(out_, record.crc32);
    put32(out_, at_most_max32(record.size));
    put32(out_, at_most_max32(record.size));
    put16(out_, static_cast<std::int64_t>(record.path.size()));
    put16(out_, static_cast<std::int64_t>(record.zip64.size()));
    out_.append(10, '\0');  // comment, disk, attributes
    put32(out_, at_most_max32(record.header));
    out_.append(record.path).append(record.zip64);
  }
  const std::int64_t end = position();

  put32(out_, zip::kZip64End);
  put64(out_, zip::kZip64EndBytes - 12);
  put16(out_, 0x031E);  // made by Unix, 3.0
  put16(out_, 45);      // 4.5 is needed
  put64(out_, 0);       // disks
  put64(out_, entries);
  put64(out_, entries);
  put64(out_, end - directory);
  put64(out_, directory);

  put32(out_, zip::kZip64Locator);
  put32(out_, 0);
  put64(out_, end);
  put32(out_, 1);

  put32(out_, zip::kEnd);
  put32(out_, 0);  // disks
  put16(out_, std::min<std::int64_t>(entries, zip::kMax16));
  put16(out_, std::min<std::int64_t>(entries, zip::kMax16));
  put32(out_, at_most_max32(end - directory));
  put32(out_, at_most_max32(directory));
  put16(out_, 0);  // comment
}

// The strides of a contiguous tensor as torch computes them: a dimension of size 0 counts as 1.
Dims contiguous_strides(const Shape& shape) {
  Dims strides = Dims::filled(shape.rank(), 1);
  for (int dim = shape.rank() - 2; dim >= 0; --dim) {
    strides[dim] = strides[dim + 1] * std::max<std::int64_t>(shape[dim + 1], 1);
  }
  return strides;
}

// The pickle of a tensor exactly as Python's pickler writes it, which memoises more than it
// recalls. PickleWriter writes the same value in other bytes.
class TensorPickle {
 public:
  TensorPickle() { out_ = "\x80\x02"; }

  // torch._utils._rebuild_tensor_v2((storage), 0, shape, strides, False, OrderedDict())
  void tensor(DType dtype, const Shape& shape);

  void raw(std::string_view opcodes) { out_.append(opcodes); }
  void memoise() {
    out_.push_back('q');
    out_.push_back(static_cast<char>(memoised_++));
  }
  std::string finish() {
    out_.push_back('.');
    return std::move(out_);
  }

 private:
  void global(std::string_view module, std::string_view name) {
    out_ += fmt::format("c{}\n{}\n", module, name);
    memoise();
  }
  void string(std::string_view text) {
    out_.push_back('X');
    put32(out_, static_cast<std::int64_t>(text.size()));
    out_.append(text);
    memoise();
  }
  void integer(std::int64_t value);
  void integers(const Dims& dims);

  std::string out_;
  int memoised_ = 0;
};

void TensorPickle::integer(std::int64_t value) {
  if (value <= 0xFF) {
    out_.push_back('K');
    put(out_, static_cast<std::uint8_t>(value));
  } else if (value <= zip::kMax16) {
    out_.push_back('M');
    put16(out_, value);
  } else if (value <= std::numeric_limits<std::int32_t>::max()) {
    out_.push_back('J');
    put32(out_, value);
  } else {
    const auto bytes =
        static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(value)) / 8 + 1);
    out_.append("\x8A").push_back(static_cast<char>(bytes));
    std::string digits;
    put64(digits, value);
    out_.append(digits, 0, bytes);
  }
}

void TensorPickle::integers(const Dims& dims) {
  if (dims.rank() > 3) out_.push_back('(');
  for (const auto dim : dims) integer(dim);
  switch (dims.rank()) {
    case 0:
      out_.push_back(')');  // which is not memoised
      return;
    case 1:
      out_.push_back('\x85');
      break;
    case 2:
      out_.push_back('\x86');
      break;
    case 3:
      out_.push_back('\x87');
      break;
    default:
      out_.push_back('t');
  }
  memoise();
}

void TensorPickle::tensor(DType dtype, const Shape& shape) {
  const std::string_view storage_class = torch_storage_class(dtype);
  const bool is_untyped = storage_class.empty();
  const std::int64_t count = shape.product();
  global("torch._utils", is_untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  raw("((");
  string("storage");
  if (is_untyped) {
    global("torch.storage", "UntypedStorage");
  } else {
    global("torch", storage_class);
  }
  string("0");
  string("cpu");
  integer(is_untyped ? count * size_of(dtype) : count);
  raw("t");
  memoise();
  raw("Q");
  integer(0);
  integers(shape);
  integers(contiguous_strides(shape));
  raw("\x89");  // requires no gradient
  global("collections", "OrderedDict");
  raw(")R");
  memoise();
  if (is_untyped) global("torch", torch_name(dtype));
  raw("t");
  memoise();
  raw("R");
  memoise();
}

// The hashes that torch computes for the names of these records: those above, with storage "0" and
// without any.
constexpr std::uint64_t kNamesWithOneStorage = 15728199511854643026U;
constexpr std::uint64_t kNamesWithoutStorage = 2908468677762923104U;

ArchiveWriter tensor_archive(DType dtype, const Shape& shape) {
  TensorPickle pickle;
  pickle.tensor(dtype, shape);
  ArchiveWriter archive("archive");
  archive.add_pickle(pickle.finish());
  archive.begin("data/0", shape.product() * size_of(dtype));
  return archive;
}

}  // namespace

TensorItemLayout tensor_item_layout(DType dtype, const Shape& shape) {
  const auto volume = checked_volume(shape);
  require(volume.has_value() && *volume <= std::numeric_limits<std::int64_t>::max() / 16,
          ErrorKind::kLayout, "a tensor of shape {} cannot be written", to_string(shape));
  ArchiveWriter archive = tensor_archive(dtype, shape);
  TensorItemLayout layout{.dtype = dtype,
                          .shape = shape,
                          .head_bytes = static_cast<std::int64_t>(archive.out().size()),
                          .payload_bytes = *volume * size_of(dtype),
                          .tail_bytes = 0};
  layout.tail_bytes = static_cast<std::int64_t>(layout.tail(0).size());
  return layout;
}

std::string TensorItemLayout::head() const {
  return std::move(tensor_archive(dtype, shape).out());
}

std::string TensorItemLayout::tail(std::uint32_t payload_crc32) const {
  ArchiveWriter archive = tensor_archive(dtype, shape);
  archive.out().clear();
  archive.skip(head_bytes + payload_bytes);
  archive.end(payload_crc32);
  archive.finish(kNamesWithOneStorage);
  return std::move(archive.out());
}

std::string torch_archive(std::string_view data_pkl,
                          std::string_view name,
                          std::span<const TorchStorage> storages) {
  ArchiveWriter archive(name);
  archive.add_pickle(data_pkl);
  for (const auto& storage : storages)
    archive.add(fmt::format("data/{}", storage.key), storage.bytes);
  std::uint64_t names = storages.empty() ? kNamesWithoutStorage : kNamesWithOneStorage;
  for (std::size_t i = 1; i < storages.size(); ++i) names = hash_combine(names, i);
  archive.finish(names);
  return std::move(archive.out());
}

std::string extra_state_archive() {
  TensorPickle pickle;
  pickle.raw("]");
  pickle.memoise();
  pickle.tensor(DType::kU8, {0});
  pickle.raw("a");
  const TorchStorage empty{.key = "0", .bytes = {}};
  return torch_archive(pickle.finish(), "archive", {&empty, 1});
}

}  // namespace ferry::distckpt
