// Archives of torch.save that are damaged, or that others wrote: refused or read, never trusted.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/distckpt/formats/torch_save/torch_zip_archives.h"

namespace ferry::distckpt {
namespace torch_zip_damage_test {

using namespace std::string_literals;
using torch_zip_test::archive_error_of;
using torch_zip_test::ByteFile;
using torch_zip_test::central_entry;
using torch_zip_test::kZipGlobals;
using torch_zip_test::parse_archive_of;
using torch_zip_test::pattern;
using torch_zip_test::tensor_archive;
using torch_zip_test::with;
using torch_zip_test::write;

TEST(TorchZipDamage, RefusesDamage) {
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

TEST(TorchZipDamage, ReadsArchivesOfOtherWriters) {
  PlainZip zip = plain_zip();
  zip.add("a/version", "3\n");
  EXPECT_EQ(parse_archive_of(zip.finish()).shape, Shape({3, 4}));
}

TEST(TorchZipDamage, AChecksumOfZeroWasNeverComputed) {
  PlainZip zip = plain_zip();
  zip.add("a/version", "3\n");
  for (auto& record : zip.records) {
    record.crc32 = 0;
    with(zip.out, record.header + 14, std::uint32_t{0}).swap(zip.out);
  }
  EXPECT_EQ(parse_archive_of(zip.finish()).storage.crc32, 0U);
}

TEST(TorchZipDamage, RefusesArchivesThatTorchWouldNotWrite) {
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

TEST(TorchZipDamage, SurvivesMutations) {
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

TEST(TorchZipDamage, ReadsBackAnObjectAnywhereInAFile) {
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

TEST(TorchZipDamage, SurvivesMutationsOfAnObject) {
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

TEST(TorchZipDamage, EveryTruncationIsAnError) {
  const std::string archive = tensor_archive(DType::kF32, {4});
  const ByteFile file(archive);
  for (std::int64_t length = 0; length < file.file().size(); ++length) {
    EXPECT_THROW(parse_tensor_item(file.file(), 0, length), Error) << length;
  }
}

}  // namespace torch_zip_damage_test
}  // namespace ferry::distckpt
