#include "distckpt/execute/file_box_io.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/execute/executor.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/random_model.h"
#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace file_box_io_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::read_bytes;
using support::same_bytes;
using support::TempDir;
using support::write_bytes;

Storage file_storage(const fs::path& path) {
  return FileStorage{.path = path, .size = static_cast<std::int64_t>(fs::file_size(path))};
}

// `runs` runs of `run_bytes` bytes, `stride` apart.
Region region_of(std::int64_t offset,
                 std::int64_t runs,
                 std::int64_t run_bytes,
                 std::int64_t stride) {
  return {.at = {.storage = 0, .offset = offset, .strides = {stride, 1}},
          .size = {runs, run_bytes},
          .element_size = 1};
}

std::vector<std::byte> gather(std::span<const std::byte> file, const Region& region) {
  std::vector<std::byte> packed;
  for (std::int64_t r = 0; r < region.size[0]; ++r) {
    const auto run =
        file.subspan(static_cast<std::size_t>(region.at.offset + r * region.at.strides[0]),
                     static_cast<std::size_t>(region.size[1]));
    packed.insert(packed.end(), run.begin(), run.end());
  }
  return packed;
}

std::vector<std::byte> read(FileSource& source, const Region& region) {
  std::vector<std::byte> packed(static_cast<std::size_t>(region.num_bytes()));
  std::vector<ChecksumPart> parts;
  source.read(region, packed, parts);
  source.commit(parts);
  return packed;
}

class FileSourceModes : public testing::TestWithParam<ReadMode> {};

// Runs far apart are read one by one, runs close together with the gaps between them.
TEST_P(FileSourceModes, ReadsRunsFarApartAndCloseTogetherAlike) {
  const TempDir dir;
  Random random(1);
  const auto bytes = random.bytes(3 << 20);
  write_bytes(dir / "file", bytes);
  FileSource source({file_storage(dir / "file")}, {}, GetParam());
  for (int i = 0; i < 80; ++i) {
    const auto run = random.between(1, random.chance(10) ? 200'000 : 500);
    const auto stride = run + random.between(0, random.chance(50) ? run + 1 : 5000);
    const auto room = (std::ssize(bytes) - run) / stride;
    const auto runs = random.between(1, std::min<std::int64_t>(room, 2000) + 1);
    const auto end = (runs - 1) * stride + run;
    const auto region = region_of(random.between(0, std::ssize(bytes) - end), runs, run, stride);
    ASSERT_TRUE(same_bytes(gather(bytes, region), read(source, region)))
        << runs << " runs of " << run << ", " << stride << " apart";
  }
}

// torch.save keeps fewer elements of an expanded tensor than it has.
TEST_P(FileSourceModes, ReadsElementsThatLieOnOnePlace) {
  const TempDir dir;
  const auto bytes = Random(4).bytes(5000);
  write_bytes(dir / "file", bytes);
  FileSource source({file_storage(dir / "file")}, {}, GetParam());
  // Strides of zero outside, inside and everywhere, and windows that overlap.
  const std::pair<Dims, Dims> cases[] = {
      {{24}, {0}},        {{3, 8}, {0, 2}},       {{8, 3}, {2, 0}},
      {{64, 64}, {0, 0}}, {{2, 3, 4}, {8, 0, 2}}, {{100, 9}, {2, 2}},
      {{3, 2}, {0, 4096}}};
  for (const auto& [size, strides] : cases) {
    const Region region{
        .at = {.storage = 0, .offset = 10, .strides = strides}, .size = size, .element_size = 2};
    std::vector<std::byte> expected(static_cast<std::size_t>(region.num_bytes()));
    copy_strided(expected.data(), packed_strides(region), bytes.data() + 10, strides, size, 2);
    EXPECT_TRUE(same_bytes(expected, read(source, region)))
        << to_string(size) << " with strides " << to_string(strides);
  }
}

TEST_P(FileSourceModes, VerifiesTheChecksumsOfWhatWasReadWhole) {
  const TempDir dir;
  Random random(2);
  auto bytes = random.bytes(10'000);
  write_bytes(dir / "file", bytes);
  std::vector<ExpectedChecksum> expected;
  for (std::int64_t at = 0; at < 10'000; at += 1000) {
    expected.push_back({.range = {.storage = 0, .offset = at, .size = 900},
                        .crc = crc32(std::span(bytes).subspan(static_cast<std::size_t>(at), 900)),
                        .name = fmt::format("w{}", at)});
  }
  {
    FileSource source({file_storage(dir / "file")}, expected, GetParam());
    EXPECT_EQ(source.verify_checksums(), 0);
    read(source, region_of(5000, 1, 5000, 5000));
    read(source, region_of(500, 1, 4500, 4500));
    EXPECT_EQ(source.verify_checksums(), 9);  // the first was read in part
    read(source, region_of(0, 5, 100, 100));
    EXPECT_EQ(source.verify_checksums(), 10);
  }
  expected[7].crc ^= 1;
  FileSource source({file_storage(dir / "file")}, expected, GetParam());
  read(source, region_of(0, 2, 5000, 5000));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"file", "7000 to 7900", "w7000", "CRC-32"},
                    [&] { source.verify_checksums(); }));
}

// Columns are read run by run: their checksums combine all the same.
TEST_P(FileSourceModes, CombinesChecksumsOfInterleavedRuns) {
  const TempDir dir;
  const auto bytes = Random(3).bytes(64 * 300);
  write_bytes(dir / "file", bytes);
  FileSource source({file_storage(dir / "file")},
                    {{.range = {.storage = 0, .offset = 0, .size = std::ssize(bytes)},
                      .crc = crc32(bytes),
                      .name = "w"}},
                    GetParam());
  for (const std::int64_t column : {200, 0, 100}) read(source, region_of(column, 64, 100, 300));
  EXPECT_EQ(source.verify_checksums(), 1);
}

INSTANTIATE_TEST_SUITE_P(,
                         FileSourceModes,
                         testing::Values(ReadMode::kCached, ReadMode::kDirect),
                         [](const auto& mode) {
                           return mode.param == ReadMode::kCached ? "cached" : "direct";
                         });

TEST(FileSource, RefusesAFileOfAnotherSizeThanItsHeadersSaid) {
  const TempDir dir;
  write_bytes(dir / "file", Random(4).bytes(100));
  FileSource source({FileStorage{.path = dir / "file", .size = 101}});
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file", "100 bytes", "101"},
                    [&] { read(source, region_of(0, 1, 10, 10)); }));
}

TEST(FileSource, RefusesAFileThatWasChangedMeanwhile) {
  const TempDir dir;
  write_bytes(dir / "file", Random(5).bytes(100));
  FileSource source({file_storage(dir / "file")});
  read(source, region_of(0, 1, 10, 10));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // coarser clocks tick every 10
  support::corrupt(dir / "file", 50);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file", "changed"}, [&] { source.verify_checksums(); }));
}

TEST(FileSource, ReadsMemoryAsItReadsAFile) {
  auto bytes = Random(8).bytes(400);
  FileSource source({MemoryStorage{.data = bytes.data(), .size = 400}});
  const auto region = region_of(20, 5, 7, 60);
  EXPECT_TRUE(same_bytes(gather(bytes, region), read(source, region)));
}

TEST(FileSource, RefusesABoxBeyondAChunkAndWhatIsNoFile) {
  FileSource source({ChunkStorage{.path = "w.h5", .offset = 12}, RankStorage{}});
  auto region = region_of(0, 1, 10, 10);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w.h5", "bytes 12 to 12", "ends behind"},
                    [&] { read(source, region); }));
  region.at.storage = 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"memory"}, [&] { read(source, region); }));
}

TEST(FileSink, WritesRunsAndTheirChecksums) {
  const TempDir dir;
  Random random(6);
  const auto rows = random.bytes(64 * 300);
  FileSink sink({FileStorage{.path = dir / "file", .size = 20'000}},
                {{.storage = 0, .offset = 400, .size = 64 * 300}}, WriteFile::Mode::kCreate);
  for (const std::int64_t column : {200, 0, 100}) {
    EXPECT_EQ(sink.ledger().combined(0), std::nullopt);
    std::vector<ChecksumPart> parts;
    sink.write(region_of(400 + column, 64, 100, 300), gather(rows, region_of(column, 64, 100, 300)),
               parts);
    sink.commit(parts);
  }
  sink.write_raw(0, 19'990, std::span(rows).first(10));
  sink.sync();
  std::vector<std::byte> expected(20'000);
  std::ranges::copy(rows, expected.begin() + 400);
  std::ranges::copy_n(rows.begin(), 10, expected.begin() + 19'990);
  EXPECT_TRUE(same_bytes(expected, read_bytes(dir / "file")));
  EXPECT_EQ(sink.ledger().combined(0), crc32(rows));
}

TEST(FileSink, LeavesHolesWhereZerosAreWrittenToANewFile) {
  const TempDir dir;
  const std::vector<std::byte> zeros(1 << 20);
  FileSink sink({FileStorage{.path = dir / "file", .size = 1 << 20}}, {}, WriteFile::Mode::kCreate);
  std::vector<ChecksumPart> parts;
  sink.write(region_of(0, 1, 1 << 20, 1 << 20), zeros, parts);
  sink.sync();
  struct stat status {};
  ASSERT_EQ(::stat((dir / "file").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 1 << 20);
  EXPECT_EQ(status.st_blocks, 0);
}

// An interrupted run may have written something else there.
TEST(FileSink, WritesZerosToAFileThatWasThere) {
  const TempDir dir;
  write_bytes(dir / "file", Random(7).bytes(1000));
  FileSink sink({FileStorage{.path = dir / "file", .size = 1000}}, {}, WriteFile::Mode::kReopen);
  std::vector<ChecksumPart> parts;
  const std::vector<std::byte> zeros(1000);
  sink.write(region_of(0, 1, 1000, 1000), zeros, parts);
  EXPECT_TRUE(same_bytes(zeros, read_bytes(dir / "file")));
}

TEST(AllZero, LooksAtEveryByte) {
  EXPECT_TRUE(all_zero({}));
  for (const std::size_t size : {1U, 2U, 7U, 64U, 1000U}) {
    std::vector<std::byte> bytes(size);
    EXPECT_TRUE(all_zero(bytes));
    for (auto& byte : bytes) {
      byte = std::byte{1};
      ASSERT_FALSE(all_zero(bytes));
      byte = std::byte{0};
    }
  }
}

// The layout of a side in memory, as files that hold the same bytes.
Layout in_files(const support::ModelSide& side, const fs::path& folder, bool write) {
  fs::create_directory(folder);
  Layout layout;
  for (std::size_t i = 0; i < side.memory.size(); ++i) {
    const auto path = folder / fmt::format("{}", i);
    if (write) write_bytes(path, side.memory[i]);
    layout.add_storage(FileStorage{.path = path, .size = std::ssize(side.memory[i])});
  }
  for (const auto& tensor : side.layout.tensors()) layout.add_tensor(tensor);
  return layout;
}

class RandomModelsInFiles : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, RandomModelsInFiles, RandomModelsInFiles::all());

TEST_P(RandomModelsInFiles, AreCarriedToFiles) {
  for_each_seed(3001, 3040, [&](std::uint64_t seed) {
    const TempDir dir;
    const auto model = support::random_model(seed, {.large = seed == 3010});
    const auto from = in_files(model.source, dir / "from", true);
    const auto into = in_files(model.target, dir / "into", false);
    const auto plan = plan_copy(model.tensors, {.layout = &from, .map = &model.source.map},
                                {.layout = &into, .map = &model.target.map}, model.cast);
    FileSource source(from.storages(), {}, seed % 2 == 0 ? ReadMode::kCached : ReadMode::kDirect);
    FileSink sink(into.storages(), {}, WriteFile::Mode::kCreate);
    Executor({.threads = static_cast<int>(seed % 4) + 1}).submit(plan, source, &sink).wait();
    for (std::size_t i = 0; i < model.expected.size(); ++i) {
      // Bytes in which no element lies are a hole here.
      auto expected = model.expected[i];
      const auto found = read_bytes(dir / fmt::format("into/{}", i));
      ASSERT_EQ(expected.size(), found.size());
      for (std::size_t at = 0; at < expected.size(); ++at) {
        if (expected[at] == support::kUntouched && found[at] == std::byte{0}) {
          expected[at] = std::byte{0};
        }
      }
      ASSERT_TRUE(same_bytes(expected, found)) << "in file " << i;
    }
  });
}

}  // namespace file_box_io_test
}  // namespace ferry::distckpt
