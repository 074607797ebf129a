// Archives that are damaged, byte by byte, and archives that somebody made up: always an Error,
// that names file and tensor.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/execute/checksum_ledger.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/archive/shard_store.h"
#include "distckpt/formats/archive/shard_store_trailer.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/shard_stores.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace shard_store_damage_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::read_tensors;
using support::StoredBytes;
using support::TempDir;

// An archive of 10 kB: tensors of their own, in several chunks, and two slabs.
std::vector<StoredBytes> small_tensors() {
  Random random(1);
  std::vector<StoredBytes> tensors;
  const auto add = [&](const char* name, DType dtype, Shape shape) {
    auto bytes = random.bytes(shape.product() * size_of(dtype));
    for (auto& byte : bytes) byte &= std::byte{15};
    tensors.push_back({.tensor = {.name = name, .dtype = dtype, .shape = shape}, .bytes = bytes});
  };
  add("embed.weight", DType::kBF16, {20, 32});
  add("norm.weight", DType::kBF16, {32});
  add("router.bias", DType::kF32, {8});
  add("head.weight", DType::kF32, {16, 16});
  add("last_norm.weight", DType::kBF16, {16});
  return tensors;
}
constexpr ShardStoreOptions kSmallChunks{.chunk_bytes = 512, .small_tensor_bytes = 64};

// Without an executor: this is done ten thousand times.
void read_everything(const fs::path& folder) {
  const auto store = read_shard_store(folder);
  FileSource source(store.layout.storages());
  std::vector<ChecksumPart> parts;
  for (const auto& tensor : store.layout.tensors()) {
    for (const auto& shard : tensor.shards) {
      std::vector<std::byte> bytes(
          static_cast<std::size_t>(shard.box.volume() * size_of(tensor.dtype)));
      with_context(
          [&] { return "reading " + tensor.name; },
          [&] {
            source.read(
                {.at = shard.at, .size = shard.box.size, .element_size = size_of(tensor.dtype)},
                bytes, parts);
          });
    }
  }
}

TEST(ShardStoreDamage, EveryByteIsUnderAChecksum) {
  const TempDir dir;
  write_shard_store(dir / "a", small_tensors(), {.store = kSmallChunks});
  const auto path = dir / "a" / "weights.h5";
  const auto good = support::read_bytes(path);
  ASSERT_NO_THROW(read_everything(dir / "a"));
  Random random(2);
  for (std::size_t i = 0; i < good.size(); ++i) {
    auto damaged = good;
    damaged[i] ^= static_cast<std::byte>(1 << random.between(0, 7));
    support::write_bytes(path, damaged);
    ASSERT_TRUE(fails(ErrorKind::kCorrupt, {"weights.h5"}, [&] { read_everything(dir / "a"); }))
        << i;
  }
}

TEST(ShardStoreDamage, EveryTruncationIsNoticed) {
  const TempDir dir;
  write_shard_store(dir / "a", small_tensors(), {.store = kSmallChunks});
  const auto path = dir / "a" / "weights.h5";
  const auto good = support::read_bytes(path);
  for (std::size_t size = 0; size < good.size(); ++size) {
    support::write_bytes(path, std::span(good).first(size));
    ASSERT_TRUE(fails(ErrorKind::kCorrupt, {"weights.h5"}, [&] { read_everything(dir / "a"); }))
        << size;
  }
  auto longer = good;
  longer.push_back(std::byte{0});
  support::write_bytes(path, longer);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"weights.h5"}, [&] { read_everything(dir / "a"); }));
}

// The tensor that a byte belongs to.
TEST(ShardStoreDamage, NamesTheTensor) {
  const TempDir dir;
  write_shard_store(dir / "a", small_tensors(), {.store = kSmallChunks});
  const auto path = dir / "a" / "weights.h5";
  const auto good = support::read_bytes(path);
  const auto store = read_shard_store(dir / "a");
  for (const auto& tensor : store.layout.tensors()) {
    for (const auto& shard : tensor.shards) {
      const auto& chunk = std::get<ChunkStorage>(store.layout.storages()[shard.at.storage]);
      auto damaged = good;
      damaged[static_cast<std::size_t>(chunk.offset + chunk.encoded_size / 2)] ^= std::byte{1};
      support::write_bytes(path, damaged);
      const auto bytes =
          fmt::format("bytes {} to {}", chunk.offset, chunk.offset + chunk.encoded_size);
      EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"weights.h5", tensor.name, bytes, "CRC-32"},
                        [&] { read_everything(dir / "a"); }));
    }
  }
}

TEST(ShardStoreDamage, NoticesAFileOfAnotherArchive) {
  const TempDir dir;
  auto tensors = small_tensors();
  const support::WriteOptions options{
      .store = {.max_file_bytes = 1400, .chunk_bytes = 512, .small_tensor_bytes = 64}};
  write_shard_store(dir / "a", tensors, options);
  tensors[0].bytes[0] ^= std::byte{1};  // another checkpoint of the same training
  write_shard_store(dir / "b", tensors, options);
  ASSERT_EQ(support::list(dir / "a").size(), 2U);
  const auto first = support::list(dir / "a").front();
  fs::copy_file(dir / "b" / first, dir / "a" / first, fs::copy_options::overwrite_existing);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {first, "belongs to another archive"},
                    [&] { read_shard_store(dir / "a"); }));
  fs::remove(dir / "b" / support::list(dir / "b").back());
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"weights-00002-of-00002.h5", "is missing"},
                    [&] { read_shard_store(dir / "b"); }));
  fs::copy_file(dir / "a" / first, dir / "a" / "weights.h5");
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"several archives"}, [&] { read_shard_store(dir / "a"); }));
}

// --- Made up, with checksums that are right ---

struct MadeUp {
  std::string index{};
  std::vector<ChunkPlace> chunks{};
  std::int64_t bytes = 4096;  // before the index
};

constexpr std::string_view kGoodIndex =
    R"({"datasets":[{"chunk":[4,8],"dtype":"BF16","path":"tensors/w","shape":[8,8]},)"
    R"({"chunk":[6],"dtype":"F32","path":"slabs/F32","shape":[6]}],"file":0,"files":1,)"
    R"("format":"ferry-archive-1","small_files":{"hf/a":[0,4]},"tensors":[)"
    R"({"begin":0,"dataset":0,"name":"w","shape":[8,8]},{"begin":2,"dataset":1,"name":"b","shape":[4]}],)"
    R"("trailers":[]})";

fs::path write(const TempDir& dir, const MadeUp& file) {
  fs::remove_all(dir / "a");
  fs::create_directories(dir / "a");
  const auto path = dir / "a" / "weights.h5";
  write_text(path, std::string(static_cast<std::size_t>(file.bytes), 'x') + file.index);
  append_trailer(path, file.chunks,
                 {.begin = file.bytes, .end = file.bytes + std::ssize(file.index)});
  return dir / "a";
}

const std::vector<ChunkPlace> kGoodChunks{{.offset = 100, .size = 60, .crc = 0x78787878},
                                          {.offset = 200, .size = 60, .crc = 0x78787878},
                                          {.offset = 300, .size = 30, .crc = 0x78787878}};

TEST(ShardStoreMadeUp, TheIndexThatTheOthersVary) {
  const TempDir dir;
  const auto store =
      read_shard_store(write(dir, {.index = std::string(kGoodIndex), .chunks = kGoodChunks}));
  ASSERT_EQ(store.layout.tensors().size(), 2U);
  EXPECT_EQ(store.files.at("hf/a"), "xxxx");
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"tensors/w[0:4, 0:8]", "CRC-32"}, [&] { read_tensors(store); }));
}

TEST(ShardStoreMadeUp, RefusesAnIndexThatDoesNotFit) {
  struct Case {
    std::string_view from;
    std::string_view to;
    std::string_view says;
  };
  const Case cases[] = {
      {R"("shape":[8,8]},{"chunk")", R"("shape":[8,9]},{"chunk")", "more chunks"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":[4,8]},{"chunk")", "fewer than the trailer"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":[-8,8]},{"chunk")", "holds -8"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":[8]},{"chunk")", "chunks [4, 8]"},
      {R"("shape":[8,8]},{"chunk")",
       R"("shape":[4611686018427387904,4611686018427387904]},{"chunk")", "more chunks"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":[9223372036854775807,8]},{"chunk")",
       "dimension of"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":[1,1,1,1,1,8,8]},{"chunk")", "7 dimensions"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":[8,"8"]},{"chunk")", "shape"},
      {R"("shape":[8,8]},{"chunk")", R"("shape":8},{"chunk")", "is not a list"},
      {R"("chunk":[4,8])", R"("chunk":[0,8])", "or empty"},
      {R"("chunk":[4,8])", R"("chunk":[4,-8])", "holds -8"},
      {R"("chunk":[4,8])", R"("chunk":[8192,8192])", "larger than"},
      {R"("chunk":[4,8])", R"("chunk":[4611686018427387904,4611686018427387904])", "larger than"},
      {R"("BF16")", R"("BF17")", "unknown dtype"},
      {R"("BF16")", R"("U8")", "cannot lie in bytes"},
      {R"(tensors/w)", R"(tensors/../w)", "its dataset tensors/../w"},
      {R"(slabs/F32)", R"(tensors/w)", "is there twice"},
      {R"(slabs/F32)", R"(tensors/b)", "its dataset tensors/b"},
      {R"("dataset":0)", R"("dataset":2)", "lies in dataset 2 of 2"},
      {R"("dataset":0)", R"("dataset":-1)", "lies in dataset -1"},
      {R"("dataset":0)", R"("dataset":1.5)", "dataset"},
      {R"("dataset":1)", R"("dataset":0)", "has shape"},
      {R"("begin":2)", R"("begin":3)", "do not lie in one chunk"},
      {R"("begin":2)", R"("begin":-1)", "do not lie in one chunk"},
      {R"("begin":2)", R"("begin":9223372036854775807)", "do not lie in one chunk"},
      {R"("shape":[4]})", R"("shape":[4611686018427387904,4]})", "overflows"},
      {R"("name":"b")", R"("name":"w")", "w"},
      {R"("name":"w")", R"("name":"v")", "its dataset tensors/w"},
      {R"(,{"begin":2,"dataset":1,"name":"b","shape":[4]})", "", "0 tensors lie in slabs/F32"},
      {R"("file":0)", R"("file":1)", "says that it is file"},
      {R"("files":1)", R"("files":2)", "says that it is file"},
      {R"("hf/a":[0,4])", R"("hf/a":[0,40000])", "hf/a cannot lie"},
      {R"("hf/a":[0,4])", R"("hf/a":[4,0])", "hf/a cannot lie"},
      {R"("hf/a":[0,4])", R"("hf/a":[-1,4])", "hf/a cannot lie"},
      {R"("hf/a":[0,4])", R"("hf/a":[0,4000],"hf/b":[0,4000])", "hf/b cannot lie"},
      {R"("hf/a":[0,4])", R"("hf/a":4)", "not a range"},
      {R"("hf/a":[0,4])", R"("hf/a":[0,4],"hf/a":[0,4])", "occurs twice"},
      {R"("tensors":[)", R"("tensors":{},"x":[)", "is not a list"},
      {R"({"datasets")", R"({{"datasets")", "not valid JSON"},
      {R"("datasets")", R"("data")", "missing"},
  };
  const TempDir dir;
  for (const auto& one : cases) {
    std::string index(kGoodIndex);
    const auto at = index.find(one.from);
    ASSERT_NE(at, std::string::npos) << one.from;
    index.replace(at, one.from.size(), one.to);
    const auto folder = write(dir, {.index = index, .chunks = kGoodChunks});
    try {
      read_shard_store(folder);
      ADD_FAILURE() << index << " was read";
    } catch (const Error& error) {
      EXPECT_TRUE(error.kind() == ErrorKind::kCorrupt || error.kind() == ErrorKind::kLayout);
      EXPECT_NE(std::string_view(error.what()).find(one.says), std::string_view::npos)
          << one.to << ": " << error.what();
    }
  }
}

TEST(ShardStoreMadeUp, RefusesAnotherFormat) {
  const TempDir dir;
  std::string index(kGoodIndex);
  index.replace(index.find("archive-1"), 9, "archive-2");
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"ferry-archive-2", "expected"}, [&] {
    read_shard_store(write(dir, {.index = index, .chunks = kGoodChunks}));
  }));
}

// The trailer's own numbers, each made huge, odd or zero, under a checksum that is right or wrong.
TEST(ShardStoreMadeUp, RefusesATrailerThatDoesNotFit) {
  const TempDir dir;
  write(dir, {.index = std::string(kGoodIndex), .chunks = kGoodChunks});
  const auto path = dir / "a" / "weights.h5";
  const auto good = support::read_bytes(path);
  const auto trailer = 4096 + kGoodIndex.size();
  for (auto at = trailer; at + 8 <= good.size(); at += 4) {
    for (const std::uint64_t value :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0x7fff'ffff'ffff'ffff},
          ~std::uint64_t{0}, std::uint64_t{1} << 60, std::uint64_t{5000}}) {
      auto damaged = good;
      std::memcpy(damaged.data() + at, &value, sizeof value);
      if (damaged == good) continue;
      support::write_bytes(path, damaged);
      EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"weights.h5"}, [&] { read_shard_store(dir / "a"); }));
    }
  }
}

TEST(ShardStoreMadeUp, ChunksLieApart) {
  const TempDir dir;
  for (const auto& other :
       {ChunkPlace{.offset = 120, .size = 60}, ChunkPlace{.offset = 100, .size = 60},
        ChunkPlace{.offset = 330, .size = 0}, ChunkPlace{.offset = 50, .size = 51},
        ChunkPlace{.offset = -1, .size = 9}, ChunkPlace{.offset = 1LL << 62, .size = 9},
        ChunkPlace{.offset = 2000, .size = 0xffffffff}}) {
    // append_trailer refuses to write it, so that the range is put in afterwards.
    write(dir, {.index = std::string(kGoodIndex), .chunks = kGoodChunks});
    const auto path = dir / "a" / "weights.h5";
    auto bytes = support::read_bytes(path);
    const auto table = 4096 + kGoodIndex.size();
    std::memcpy(bytes.data() + table + sizeof(ChunkPlace), &other, sizeof other);
    const auto tail = bytes.size() - 48;
    const auto crc = crc32(std::span(bytes).subspan(table, tail + 32 - table));
    std::memcpy(bytes.data() + tail + 32, &crc, sizeof crc);
    support::write_bytes(path, bytes);
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"apart from each other"},
                      [&] { read_shard_store(dir / "a"); }));
  }
}

// Bytes at random in an index under right checksums: whatever it says, nothing worse than an Error.
TEST(ShardStoreMadeUp, SurvivesRandomIndices) {
  const TempDir dir;
  Random random(7);
  constexpr std::string_view kLetters = "0123456789-[]{},:\"eE.wxF";
  int read = 0;
  for (int i = 0; i < 500; ++i) {
    std::string index(kGoodIndex);
    for (auto n = random.between(1, 3); n > 0; --n) {
      const auto at = static_cast<std::size_t>(random.between(0, std::ssize(index) - 1));
      index[at] = kLetters[static_cast<std::size_t>(random.between(0, std::ssize(kLetters) - 1))];
    }
    try {
      read_tensors(read_shard_store(write(dir, {.index = index, .chunks = kGoodChunks})), 1);
      ++read;
    } catch (const Error& error) {
      ASSERT_NE(error.kind(), ErrorKind::kBug) << index << "\n" << error.what();
    }
  }
  EXPECT_EQ(read, 0);  // its chunks are no chunks
}

}  // namespace shard_store_damage_test
}  // namespace ferry::distckpt
