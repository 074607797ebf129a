// torch.save archives: torch's own are read and written again byte for byte; damage is refused.
#include "distckpt/formats/torch_save/torch_zip.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace torch_zip_test {

using namespace std::string_literals;

constexpr std::string_view kZipGlobals[] = {"torch.", "argparse.Namespace",
                                            "collections.OrderedDict", "numpy.", "_codecs.encode"};

// A file of these bytes.
class ByteFile {
 public:
  explicit ByteFile(const std::string& bytes) : path_(folder_ / "bytes") {
    std::ofstream(path_, std::ios::binary) << bytes;
    file_.emplace(path_);
  }
  const ReadFile& file() const { return *file_; }
  std::string name() const { return path_.string(); }

 private:
  support::TempDir folder_;
  std::filesystem::path path_;
  std::optional<ReadFile> file_;
};

std::string bytes_at(const ReadFile& file, std::int64_t offset, std::int64_t size) {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

std::string pattern(std::int64_t size) {
  std::string bytes(static_cast<std::size_t>(size), '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 256);
  return bytes;
}

std::string tensor_archive(DType dtype, const Shape& shape) {
  const TensorItemLayout layout = tensor_item_layout(dtype, shape);
  const std::string payload = pattern(layout.payload_bytes);
  return layout.head() + payload + layout.tail(crc32(as_bytes(payload)));
}

TensorItem parse_archive_of(const std::string& archive) {
  const ByteFile file(archive);
  return parse_tensor_item(file.file(), 0, file.file().size());
}

// The error of `archive`, without the file's name.
std::string archive_error_of(const std::string& archive) {
  const ByteFile file(archive);
  try {
    parse_tensor_item(file.file(), 0, file.file().size());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with(file.name() + ": ")) << message;
    return message.substr(std::min(message.size(), file.name().size() + 2));
  }
  return "no error";
}

template <typename T>
std::string with(std::string archive, std::size_t at, T value) {
  std::memcpy(&archive.at(at), &value, sizeof value);
  return archive;
}

// The position of the n-th central directory entry.
std::size_t central_entry(const std::string& archive, int index) {
  std::size_t at = archive.find("PK\1\2");
  for (int i = 0; i < index; ++i) at = archive.find("PK\1\2", at + 4);
  return at;
}

// Every item of every checkpoint in the test data, as torch wrote it.
TEST(TorchZip, WritesTheVeryBytesThatTorchWrites) {
  constexpr std::string_view kMetadataGlobals[] = {"torch.", "megatron.core.", "pathlib.PosixPath"};
  int tensors = 0;
  int extra_states = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(support::test_data(""))) {
    if (entry.path().filename() != ".metadata") continue;
    const Pickle metadata =
        Pickle::parse(read_text(entry.path()),
                      {.source = entry.path().string(), .allowed_globals = kMetadataGlobals});
    for (const auto& [index, info] : metadata.root().at("storage_data").items()) {
      const ReadFile file(entry.path().parent_path() / info.at("relative_path").as_string());
      const std::int64_t offset = info.at("offset").as_int();
      const std::int64_t length = info.at("length").as_int();
      const std::string expected = bytes_at(file, offset, length);
      SCOPED_TRACE(fmt::format("{} at byte {}", file.path().string(), offset));
      if (!index.find("offset")) {
        const Pickle object = read_torch_object(file, offset, length, kZipGlobals);
        if (object.root().kind() == PickleKind::kList && object.root().size() == 1 &&
            object.root()[0].is_object("torch._utils._rebuild_tensor_v2") &&
            index.at("fqn").as_string().find("_extra_state") != std::string_view::npos) {
          EXPECT_EQ(extra_state_archive(), expected);
          ++extra_states;
        }
        continue;
      }
      const TensorItem item = parse_tensor_item(file, offset, length);
      const TensorItemLayout layout = tensor_item_layout(item.dtype, item.shape);
      ASSERT_EQ(layout.total_bytes(), length);
      EXPECT_EQ(item.payload_offset, offset + layout.head_bytes);
      EXPECT_EQ(item.payload_bytes, layout.payload_bytes);
      EXPECT_TRUE(item.contiguous);
      const std::string payload = bytes_at(file, item.payload_offset, item.payload_bytes);
      EXPECT_EQ(crc32(as_bytes(payload)), item.storage.crc32);
      EXPECT_EQ(layout.head() + payload + layout.tail(item.storage.crc32), expected);
      ++tensors;
    }
  }
  EXPECT_GT(tensors, 300);
  EXPECT_GT(extra_states, 50);
}

TEST(TorchZip, WritesCommonPtAsTorchDoes) {
  const auto path = support::test_data("llama_tp2pp2_mc0161/iter_0000010/common.pt");
  const ReadFile file(path);
  const TorchArchive archive = read_torch_archive(file, 0, file.size());
  EXPECT_EQ(archive.name, "common");
  EXPECT_EQ(torch_archive(read_torch_record(file, archive.at("data.pkl")), "common"),
            bytes_at(file, 0, file.size()));
  const Pickle common = read_torch_object(file, 0, file.size(), kZipGlobals);
  EXPECT_EQ(common.root().at("iteration").as_int(), 10);
  EXPECT_EQ(common.root().at("args").at("num_layers").as_int(), 4);
}

TEST(TorchZip, ReadsBackEveryDTypeAnywhereInAFile) {
  for (const DType dtype :
       {DType::kBool, DType::kU8, DType::kI8, DType::kI16, DType::kI32, DType::kI64, DType::kF8E4M3,
        DType::kF8E5M2, DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const Shape& shape :
         {Shape(), Shape({0}), Shape({2, 0, 3}), Shape({7}), Shape({300, 70}), Shape({1, 24, 32}),
          Shape({2, 3, 4, 5}), Shape({2, 1, 3, 1, 2, 5})}) {
      SCOPED_TRACE(fmt::format("{} {}", torch_name(dtype), to_string(shape)));
      const std::string archive = tensor_archive(dtype, shape);
      const ByteFile file("elsewhere" + archive + "after");
      const auto length = static_cast<std::int64_t>(archive.size());
      const TensorItem item = parse_tensor_item(file.file(), 9, length);
      EXPECT_EQ(item.dtype, dtype);
      EXPECT_EQ(item.shape, shape);
      EXPECT_TRUE(item.contiguous);
      EXPECT_EQ(item.payload_bytes, shape.product() * size_of(dtype));
      EXPECT_EQ((item.payload_offset - 9) % 64, 0);
      EXPECT_EQ(bytes_at(file.file(), item.payload_offset, item.payload_bytes),
                pattern(item.payload_bytes));
    }
  }
}

TEST(TorchZip, PicklesAn8BitFloatAsTorchDoes) {
  const ByteFile file(tensor_archive(DType::kF8E4M3, {300, 300}));
  const TorchArchive archive = read_torch_archive(file.file(), 0, file.file().size());
  EXPECT_EQ(
      read_torch_record(file.file(), archive.at("data.pkl")),
      "\x80\x02"
      "ctorch._utils\n_rebuild_tensor_v3\nq\x00((X\x07\x00\x00\x00storageq\x01"
      "ctorch.storage\nUntypedStorage\nq\x02X\x01\x00\x00\x00"
      "0q\x03X\x03\x00\x00\x00"
      "cpuq\x04J\x90\x5F\x01\x00tq\x05QK\x00M\x2C\x01M\x2C\x01\x86q\x06M\x2C\x01K\x01\x86q\x07"
      "\x89"
      "ccollections\nOrderedDict\nq\x08)Rq\x09"
      "ctorch\nfloat8_e4m3fn\nq\x0A"
      "tq\x0BRq\x0C."s);
}

// 4 GiB and a little: sizes and positions no longer fit into the fields of 1989.
TEST(TorchZip, ReadsBackRecordsBeyond4GiB) {
  const support::TempDir folder;
  for (const std::int64_t elements :
       {std::int64_t{0xFFFFFFFE}, std::int64_t{0xFFFFFFFF}, (std::int64_t{1} << 32) + 5}) {
    const TensorItemLayout layout = tensor_item_layout(DType::kU8, {elements});
    const std::string head = layout.head();
    const std::string tail = layout.tail(0x12345678);
    ASSERT_EQ(static_cast<std::int64_t>(head.size()), layout.head_bytes);
    ASSERT_EQ(static_cast<std::int64_t>(tail.size()), layout.tail_bytes);
    const auto path = folder / fmt::format("{}", elements);
    {
      const WriteFile file(path, layout.total_bytes());  // a hole where the payload lies
      file.write_at(0, as_bytes(head));
      file.write_at(layout.head_bytes + layout.payload_bytes, as_bytes(tail));
    }
    const ReadFile file(path);
    const TensorItem item = parse_tensor_item(file, 0, file.size());
    EXPECT_EQ(item.shape, Shape({elements}));
    EXPECT_EQ(item.payload_offset, layout.head_bytes);
    EXPECT_EQ(item.payload_bytes, elements);
    EXPECT_EQ(item.storage.crc32, 0x12345678U);
  }
}

TEST(TorchZip, LaysOutTheSameTensorTheSameWay) {
  const TensorItemLayout layout = tensor_item_layout(DType::kBF16, {24, 32});
  EXPECT_EQ(layout.head(), layout.head());
  EXPECT_EQ(layout.tail(7), layout.tail(7));
  EXPECT_NE(layout.tail(7), layout.tail(8));
  EXPECT_THROW(tensor_item_layout(DType::kF64, {std::int64_t{1} << 40, std::int64_t{1} << 40}),
               Error);
}

// The data.pkl of a tensor, as _rebuild_tensor_v2 gets it.
struct Rebuild {
  std::string_view storage_class = "torch.FloatStorage";
  std::string_view key = "0";
  std::int64_t count = 12;
  std::int64_t first = 0;
  Dims shape{3, 4};
  Dims strides{4, 1};
};

void write(PickleWriter& pickle, const Rebuild& rebuild) {
  pickle.begin_call("torch._utils._rebuild_tensor_v2");
  pickle.begin_persistent_id().string("storage").global(rebuild.storage_class);
  pickle.string(rebuild.key).string("cpu").integer(rebuild.count).end_persistent_id();
  pickle.integer(rebuild.first).integers(rebuild.shape).integers(rebuild.strides).boolean(false);
  pickle.begin_call("collections.OrderedDict").end_call().end_call();
}

std::string archive_of(PickleWriter& pickle) {
  const std::string floats = pattern(48);
  const TorchStorage storage{.key = "0", .bytes = floats};
  return torch_archive(pickle.finish(), "archive", {&storage, 1});
}

std::string archive_of(const Rebuild& rebuild) {
  PickleWriter pickle;
  write(pickle, rebuild);
  return archive_of(pickle);
}

TEST(TorchZip, ReadsPartsOfAStorage) {
  const TensorItem whole = parse_archive_of(archive_of({}));
  EXPECT_TRUE(whole.contiguous);
  const TensorItem rows =
      parse_archive_of(archive_of({.first = 4, .shape = {2, 4}, .strides = {4, 1}}));
  EXPECT_TRUE(rows.contiguous);
  EXPECT_EQ(rows.payload_offset, whole.payload_offset + 16);
  EXPECT_EQ(rows.payload_bytes, 32);
  EXPECT_EQ(rows.storage.size, 48);
  EXPECT_FALSE(parse_archive_of(archive_of({.shape = {4, 3}, .strides = {1, 4}})).contiguous);
  EXPECT_FALSE(parse_archive_of(archive_of({.shape = {3, 2}, .strides = {4, 1}})).contiguous);
  EXPECT_FALSE(parse_archive_of(archive_of({.shape = {100, 12}, .strides = {0, 1}})).contiguous);
  EXPECT_TRUE(parse_archive_of(archive_of({.shape = {1, 12}, .strides = {99, 1}})).contiguous);
}

TEST(TorchZip, ReadsParametersAndSubclasses) {
  PickleWriter parameter;
  parameter.begin_call("torch._utils._rebuild_parameter");
  write(parameter, {});
  parameter.boolean(true).begin_call("collections.OrderedDict").end_call().end_call();
  EXPECT_EQ(parse_archive_of(archive_of(parameter)).shape, Shape({3, 4}));

  PickleWriter subclass;
  subclass.begin_call("torch._tensor._rebuild_from_type_v2");
  subclass.global("torch._utils._rebuild_tensor_v2").global("torch.nn.parameter.Parameter");
  subclass.begin_tuple().begin_persistent_id().string("storage").global("torch.FloatStorage");
  subclass.string("0").string("cuda:0").integer(12).end_persistent_id();
  subclass.integer(0).integers({12}).integers({1}).boolean(false).none().end_tuple();
  subclass.begin_dict().end_dict().end_call();
  EXPECT_EQ(parse_archive_of(archive_of(subclass)).shape, Shape({12}));
}

TEST(TorchZip, RefusesATensorThatItsStorageDoesNotHold) {
  const auto refused = [](const Rebuild& rebuild) {
    const std::string message = archive_error_of(archive_of(rebuild));
    return message.find("leaves its storage of 12 elements") != std::string::npos;
  };
  EXPECT_TRUE(refused({.shape = {4, 4}}));
  EXPECT_TRUE(refused({.first = 1}));
  EXPECT_TRUE(refused({.first = -1}));
  EXPECT_TRUE(refused({.shape = {3, 4}, .strides = {5, 1}}));
  EXPECT_TRUE(refused({.shape = {3, 4}, .strides = {-4, 1}}));
  EXPECT_TRUE(refused({.shape = {3, 4}, .strides = {std::int64_t{1} << 62, 1}}));
  EXPECT_TRUE(refused({.first = std::numeric_limits<std::int64_t>::max()}));
  EXPECT_TRUE(refused({.first = 13, .shape = {0}, .strides = {1}}));
  const auto message = [](const Rebuild& rebuild) { return archive_error_of(archive_of(rebuild)); };
  EXPECT_NE(message({.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40}}), "no error");
  EXPECT_NE(message({.shape = {-1, 4}}), "no error");
  EXPECT_NE(message({.shape = {3, 4}, .strides = {1}}), "no error");
  EXPECT_NE(message({.count = 13}), "no error");
  EXPECT_NE(message({.storage_class = "torch.DoubleStorage"}), "no error");
  EXPECT_EQ(message({.key = "1"}), "archive archive has no record data/1");
}

TEST(TorchZip, RefusesAPickleThatIsNoTensor) {
  PickleWriter list;
  list.begin_list().integer(7).end_list();
  EXPECT_EQ(archive_error_of(archive_of(list)), "the pickle holds [7] where object is expected");
  PickleWriter call;
  call.begin_call("os.system").string("ls").end_call();
  EXPECT_NE(archive_error_of(archive_of(call))
                .find("names os.system at byte 66, which is outside the closed"),
            std::string::npos);
}

TEST(TorchZip, RefusesDamage) {
  const std::string archive = tensor_archive(DType::kBF16, {1, 24, 32});
  const std::size_t pickle = central_entry(archive, 0);
  const std::size_t data = central_entry(archive, 4);
  ASSERT_EQ(archive_error_of(archive), "no error");

  EXPECT_EQ(archive_error_of(""), "at byte 0: an archive of 0 bytes");
  EXPECT_EQ(archive_error_of(archive.substr(0, archive.size() - 1)),
            "at byte 3090: no archive ends here: the end record is missing");
  EXPECT_NE(archive_error_of(with(archive, 70, 'X')).find("record data.pkl at byte 64: CRC-32 "),
            std::string::npos);
  EXPECT_EQ(archive_error_of(with(archive, data + 10, std::uint16_t{8})),
            fmt::format("at byte {}: record archive/data/0 is compressed (method 8)", data));
  EXPECT_EQ(
      archive_error_of(with(archive, data + 8, std::uint16_t{0x0809})),
      fmt::format("at byte {}: record archive/data/0 has flags 0x0809, which torch never sets",
                  data));
  EXPECT_EQ(archive_error_of(with(archive, data + 16, std::uint32_t{5})),
            "at byte 2240: the data descriptor of record archive/data/0 contradicts the central "
            "directory");
  EXPECT_EQ(archive_error_of(with(archive, data + 20, std::uint32_t{1'000})),
            fmt::format("at byte {}: record archive/data/0: 1536 bytes, stored as 1000", data));
  EXPECT_EQ(archive_error_of(with(archive, data + 42, std::uint32_t{1})),
            "at byte 1: no local header of record archive/data/0");
  EXPECT_EQ(
      archive_error_of(with(archive, data + 42, std::uint32_t{0})),
      "at byte 0: the local header of record archive/data/0 contradicts the central directory");
  EXPECT_EQ(archive_error_of(with(archive, data + 42, std::uint32_t{0x7FFFFFFF})),
            fmt::format("at byte {}: record archive/data/0 leaves the archive", data));
  EXPECT_EQ(
      archive_error_of(with(archive, pickle + 46, 'b')),
      "at byte 0: the local header of record brchive/data.pkl contradicts the central directory");
  EXPECT_EQ(archive_error_of(with(archive, archive.size() - 22 + 8, std::uint32_t{0x00060006})),
            fmt::format("at byte {}: the ZIP64 end record contradicts the end record",
                        archive.size() - 98));
  EXPECT_EQ(archive_error_of(with(archive, archive.size() - 42 + 8, std::uint64_t{7})),
            fmt::format("at byte {}: the ZIP64 locator points to byte 7 of the archive, not to the "
                        "record before it",
                        archive.size() - 42));
  EXPECT_EQ(archive_error_of(with(archive, archive.size() - 22 + 20, std::uint16_t{1})),
            fmt::format("at byte {}: the end record tells of several disks or a comment",
                        archive.size() - 22));

  const ByteFile file(archive);
  EXPECT_THROW(parse_tensor_item(file.file(), 1, file.file().size()), Error);
  EXPECT_THROW(parse_tensor_item(file.file(), -1, 10), Error);
  EXPECT_THROW(parse_tensor_item(file.file(), 0, -1), Error);
  EXPECT_THROW(parse_tensor_item(file.file(), std::numeric_limits<std::int64_t>::max(),
                                 std::numeric_limits<std::int64_t>::max()),
               Error);
}

// Local header, payload; central entry; no more: what other writers of zip files make of records.
struct PlainZip {
  struct Record {
    std::string path;
    std::string bytes;
    std::uint32_t crc32 = 0;
    std::uint32_t header = 0;
  };

  void add(const std::string& path, const std::string& bytes) {
    records.push_back(
        {path, bytes, crc32(as_bytes(bytes)), static_cast<std::uint32_t>(out.size())});
    header(records.back(), "PK\3\4\0\0"s, false);
    out += path + bytes;
  }
  void header(const Record& record, std::string_view start, bool is_central) {
    out += start;
    out.append(is_central ? 2 : 0, '\0');
    out.append(8, '\0');
    put(record.crc32);
    put(static_cast<std::uint32_t>(record.bytes.size()));
    put(static_cast<std::uint32_t>(record.bytes.size()));
    put(static_cast<std::uint16_t>(record.path.size()));
    put(std::uint16_t{0});
  }
  template <typename T>
  void put(T value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string finish() {
    const auto directory = static_cast<std::uint32_t>(out.size());
    for (const auto& record : records) {
      header(record, "PK\1\2\0\0"s, true);
      out.append(10, '\0');
      put(record.header);
      out += record.path;
    }
    const auto bytes = static_cast<std::uint32_t>(out.size()) - directory;
    out += "PK\5\6\0\0\0\0"s;
    put(static_cast<std::uint16_t>(records.size()));
    put(static_cast<std::uint16_t>(records.size()));
    put(bytes);
    put(directory);
    put(std::uint16_t{0});
    return out;
  }

  std::string out;
  std::vector<Record> records;
};

PlainZip plain_zip() {
  PlainZip zip;
  PickleWriter pickle;
  write(pickle, {});
  zip.add("a/data.pkl", pickle.finish());
  zip.add("a/data/0", pattern(48));
  return zip;
}

TEST(TorchZip, ReadsArchivesOfOtherWriters) {
  PlainZip zip = plain_zip();
  zip.add("a/version", "3\n");
  EXPECT_EQ(parse_archive_of(zip.finish()).shape, Shape({3, 4}));
}

TEST(TorchZip, AChecksumOfZeroWasNeverComputed) {
  PlainZip zip = plain_zip();
  zip.add("a/version", "3\n");
  for (auto& record : zip.records) {
    record.crc32 = 0;
    with(zip.out, record.header + 14, std::uint32_t{0}).swap(zip.out);
  }
  EXPECT_EQ(parse_archive_of(zip.finish()).storage.crc32, 0U);
}

TEST(TorchZip, RefusesArchivesThatTorchWouldNotWrite) {
  EXPECT_EQ(archive_error_of(plain_zip().finish()), "archive a has no record version");

  PlainZip big_endian = plain_zip();
  big_endian.add("a/byteorder", "big");
  big_endian.add("a/version", "3\n");
  EXPECT_NE(archive_error_of(big_endian.finish()).find("the archive is not little endian"),
            std::string::npos);

  PlainZip twice = plain_zip();
  twice.add("a/version", "3\n");
  twice.add("a/version", "3\n");
  EXPECT_NE(archive_error_of(twice.finish()).find("record version occurs twice"),
            std::string::npos);

  PlainZip elsewhere = plain_zip();
  elsewhere.add("b/version", "3\n");
  EXPECT_NE(archive_error_of(elsewhere.finish()).find("record b/version is not in folder a"),
            std::string::npos);

  PlainZip nowhere;
  nowhere.add("version", "3\n");
  EXPECT_NE(archive_error_of(nowhere.finish()).find("record version is in no folder"),
            std::string::npos);

  // A record whose bytes hold another one's headers and bytes.
  PlainZip inner;
  inner.add("a/version", "3\n");
  PlainZip overlapping = plain_zip();
  overlapping.add("a/outer", "..." + inner.out);
  auto hidden = inner.records[0];
  hidden.header = static_cast<std::uint32_t>(overlapping.out.size() - inner.out.size());
  overlapping.records.push_back(hidden);
  EXPECT_NE(archive_error_of(overlapping.finish()).find("records outer and version overlap"),
            std::string::npos);
}

TEST(TorchZip, ComputesTheChecksumOfZip) {
  EXPECT_EQ(crc32(as_bytes("123456789")), 0xCBF43926U);
  EXPECT_EQ(crc32({}), 0U);
}

// Mutants stand one after the other in one file: opening 10,000 would be slow. `read` is given the
// file and where in it a mutant begins and how long it is.
template <typename Read>
void survive_mutations(const std::string& valid, int rounds, Read&& read) {
  std::mt19937 random(20'240'601);
  const auto below = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
  };
  std::string mutants;
  std::vector<std::int64_t> lengths;
  for (int round = 0; round < rounds; ++round) {
    std::string bytes = valid;
    bytes[below(bytes.size())] = static_cast<char>(below(256));
    if (round % 10 == 0) bytes.resize(below(bytes.size()));
    mutants += bytes;
    lengths.push_back(static_cast<std::int64_t>(bytes.size()));
  }
  const ByteFile file(mutants);
  std::int64_t offset = 0;
  int refused = 0;
  for (const std::int64_t length : lengths) {
    try {
      read(file.file(), offset, length);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt) << error.what();
      ++refused;
    }
    offset += length;
  }
  EXPECT_GT(refused, rounds / 10);
}

TEST(TorchZip, SurvivesMutations) {
  const auto read = [](const ReadFile& file, std::int64_t offset, std::int64_t length) {
    const TensorItem item = parse_tensor_item(file, offset, length);
    EXPECT_GE(item.payload_offset, offset);
    EXPECT_LE(item.payload_offset + item.payload_bytes, offset + length);
  };
  survive_mutations(tensor_archive(DType::kBF16, {32}), 10'000, read);
  survive_mutations(tensor_archive(DType::kF8E5M2, {4'000, 2}), 2'000, read);
}

// An object of one tensor of four bytes and a number.
std::string object_archive() {
  PickleWriter pickle;
  pickle.begin_dict().string("iteration").integer(10).string("state");
  write(pickle, {.storage_class = "torch.FloatStorage", .count = 1, .shape = {1}, .strides = {1}});
  const TorchStorage storage{.key = "0", .bytes = "abcd"};
  return torch_archive(pickle.end_dict().finish(), "archive", {&storage, 1});
}

TEST(TorchZip, ReadsBackAnObjectAnywhereInAFile) {
  const std::string archive = object_archive();
  const ByteFile file("before" + archive + "after");
  const std::int64_t length = std::ssize(archive);
  const Pickle object = read_torch_object(file.file(), 6, length, kZipGlobals);
  EXPECT_EQ(object.root().at("iteration").as_int(), 10);
  EXPECT_EQ(object.root().at("state").object_args()[0].persistent_id()[2].as_string(), "0");
  const TorchArchive records = read_torch_archive(file.file(), 6, length);
  EXPECT_EQ(records.name, "archive");
  EXPECT_EQ(read_torch_record(file.file(), records.at("data/0")), "abcd");
  EXPECT_EQ(records.find("data/1"), nullptr);
  EXPECT_THROW(read_torch_object(file.file(), 6, length - 1, kZipGlobals), Error);
  EXPECT_THROW(read_torch_object(file.file(), 5, length, kZipGlobals), Error);
}

TEST(TorchZip, SurvivesMutationsOfAnObject) {
  survive_mutations(object_archive(), 10'000,
                    [](const ReadFile& file, std::int64_t offset, std::int64_t length) {
                      read_torch_object(file, offset, length, kZipGlobals).root().describe();
                      for (const auto& record : read_torch_archive(file, offset, length).records) {
                        EXPECT_GE(record.offset, offset);
                        EXPECT_LE(record.offset + record.size, offset + length);
                        read_torch_record(file, record);
                      }
                    });
}

TEST(TorchZip, EveryTruncationIsAnError) {
  const std::string archive = tensor_archive(DType::kF32, {4});
  const ByteFile file(archive);
  for (std::int64_t length = 0; length < file.file().size(); ++length) {
    EXPECT_THROW(parse_tensor_item(file.file(), 0, length), Error) << length;
  }
}

}  // namespace torch_zip_test
}  // namespace ferry::distckpt
