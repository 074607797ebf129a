#include "distckpt/formats/archive/shard_store.h"

#include <gtest/gtest.h>

#include <set>

#include "distckpt/execute/executor.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/archive/shard_store_layout.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/seed_blocks.h"
#include "tests/support/shard_stores.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace shard_store_test {

using support::fails;
using support::Random;
using support::read_tensors;
using support::same_bytes;
using support::StoredBytes;
using support::TempDir;

ShardStoreOptions small_chunks(Random& random) {
  ShardStoreOptions options{.chunk_bytes = std::int64_t{1} << random.between(6, 12),
                            .small_tensor_bytes = std::int64_t{1} << random.between(3, 8)};
  if (random.chance(50)) options.max_file_bytes = random.between(1, 20'000);
  return options;
}

void expect_holds(const ShardStore& store, const std::vector<StoredBytes>& tensors) {
  const auto found = read_tensors(store);
  ASSERT_EQ(found.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& layout = store.layout.tensor(static_cast<std::uint32_t>(i));
    const auto& expected = tensors[i];
    EXPECT_EQ(layout.name, expected.tensor.name);
    EXPECT_EQ(layout.dtype, expected.tensor.dtype);
    EXPECT_EQ(layout.shape, expected.tensor.shape);
    ASSERT_TRUE(same_bytes(expected.bytes, found[i])) << layout.name;
  }
}

class RandomShardStore : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, RandomShardStore, RandomShardStore::all());

TEST_P(RandomShardStore, GivesBackAnyTensors) {
  for_each_seed(0, 59, [&](std::uint64_t seed) {
    Random random(seed);
    const TempDir dir;
    const auto tensors =
        support::random_tensors(random, static_cast<int>(random.between(1, 12)), 90);
    write_shard_store(dir / "a", tensors, {.store = small_chunks(random)});
    const auto store = read_shard_store(dir / "a");
    expect_holds(store, tensors);
    EXPECT_EQ(store.files,
              (std::map<std::string, std::string>{{"hf/config.json", "{}"}, {"hf/empty", ""}}));
  });
}

TEST_P(RandomShardStore, HasTheSameBytesAtAnyNumberOfThreads) {
  for_each_seed(100, 109, [&](std::uint64_t seed) {
    Random random(seed);
    const TempDir dir;
    const auto tensors = support::random_tensors(random, 12, 200);
    const auto options = small_chunks(random);
    write_shard_store(dir / "one", tensors, {.store = options, .threads = 1});
    write_shard_store(dir / "four", tensors, {.store = options, .threads = 4});
    EXPECT_EQ(support::read_tree(dir / "one"), support::read_tree(dir / "four"));
  });
}

// Blocks of several seeds: few runs that are broken off leave no file that is finished.
class InterruptedShardStore : public support::SeedBlocksOf<3> {};
INSTANTIATE_TEST_SUITE_P(Blocks, InterruptedShardStore, InterruptedShardStore::all());

// A run that is broken off leaves files that are finished, and others.
TEST_P(InterruptedShardStore, GoesOnWithWhatARunLeftFileByFile) {
  std::int64_t saved = 0;
  for_each_seed(200, 214, [&](std::uint64_t seed) {
    Random random(seed);
    const TempDir dir;
    std::vector<StoredBytes> tensors;
    std::int64_t total = 0;
    for (int i = 0; i < 12; ++i) {  // each of a task or two
      const Shape shape{random.between(500, 1500), 1024};
      tensors.push_back(
          {.tensor = {.name = fmt::format("t{}", i), .dtype = DType::kBF16, .shape = shape},
           .bytes = random.bytes(2 * shape.product())});
      total += std::ssize(tensors.back().bytes);
    }
    support::WriteOptions options{.store = {.max_file_bytes = 5 << 20, .chunk_bytes = 1 << 18}};
    write_shard_store(dir / "whole", tensors, options);
    options.stop_after = random.between(1, 10);
    EXPECT_TRUE(fails(ErrorKind::kCancelled, {"stopped"},
                      [&] { write_shard_store(dir / "again", tensors, options); }));
    options.stop_after = -1;
    saved += total - write_shard_store(dir / "again", tensors, options);
    EXPECT_EQ(support::read_tree(dir / "whole"), support::read_tree(dir / "again"));
  });
  EXPECT_GT(saved, 0);
}

TEST(ShardStore, SplitsIntoFilesOfAtMostThatSize) {
  Random random(1);
  const TempDir dir;
  std::vector<StoredBytes> tensors;
  for (int i = 0; i < 10; ++i) {
    tensors.push_back(
        {.tensor = {.name = fmt::format("t{}", i), .dtype = DType::kU8, .shape = {400}},
         .bytes = random.bytes(400)});
  }
  write_shard_store(dir / "a", tensors, {.store = {.max_file_bytes = 1000}});
  EXPECT_EQ(support::list(dir / "a"),
            (std::vector<std::string>{"weights-00001-of-00005.h5", "weights-00002-of-00005.h5",
                                      "weights-00003-of-00005.h5", "weights-00004-of-00005.h5",
                                      "weights-00005-of-00005.h5"}));
  expect_holds(read_shard_store(dir / "a"), tensors);
}

// The purpose of chunks: a rank reads its slice, and hardly more.
TEST(ShardStore, ATensorParallelSliceIsFewChunks) {
  Random random(2);
  const TempDir dir;
  const Shape shape{2048, 4096};
  const std::vector<StoredBytes> tensors{
      {.tensor = {.name = "w", .dtype = DType::kBF16, .shape = shape},
       .bytes = random.bytes(2 * shape.product())}};
  write_shard_store(dir / "a", tensors, {});
  const auto store = read_shard_store(dir / "a");
  const auto& tensor = store.layout.tensor(0);
  for (const int dim : {0, 1}) {
    for (const std::int64_t tp : {2, 4, 8}) {
      Box slice = Box::whole(shape);
      slice.size[dim] /= tp;
      slice.offset[dim] = slice.size[dim] * (tp - 1);
      FileSource source(store.layout.storages());
      std::vector<ChecksumPart> parts;
      std::int64_t read = 0;
      for (const auto& shard : tensor.shards) {
        const auto part = intersect(shard.box, slice);
        if (!part) continue;
        auto at = shard.at;
        for (int d = 0; d < 2; ++d)
          at.offset += (part->offset[d] - shard.box.offset[d]) * at.strides[d];
        std::vector<std::byte> bytes(static_cast<std::size_t>(2 * part->volume()));
        source.read({.at = at, .size = part->size, .element_size = 2}, bytes, parts);
        read += 2 * shard.box.volume();
      }
      EXPECT_EQ(source.num_decoded(), 16 / std::min<std::int64_t>(tp, 4)) << dim << " " << tp;
      EXPECT_EQ(read, 2 * slice.volume() * (tp == 8 ? 2 : 1));
    }
  }
}

TEST(ShardStore, DecodesEachChunkOnce) {
  Random random(3);
  const TempDir dir;
  const Shape shape{3000, 1024};
  const std::vector<StoredBytes> tensors{
      {.tensor = {.name = "w", .dtype = DType::kBF16, .shape = shape},
       .bytes = random.bytes(2 * shape.product())}};
  write_shard_store(dir / "a", tensors, {.store = {.chunk_bytes = 1 << 17}});
  const auto store = read_shard_store(dir / "a");
  FileSource source(store.layout.storages());
  const TensorMap map{.links = {{.model_box = Box::whole(shape), .stored_box = Box::whole(shape)}}};
  const std::vector<ModelTensor> model{{.name = "w", .dtype = DType::kBF16, .shape = shape}};
  const auto plan = plan_read(model, {.layout = &store.layout, .map = &map});
  Executor({.threads = 4}).submit(plan, source, nullptr).wait();
  EXPECT_EQ(source.num_decoded(), std::ssize(store.layout.storages()));
}

TEST(ShardStore, RefusesATensorWhoseNameIsNoDatasets) {
  const TempDir dir;
  for (const auto* name : {"a/b", ".", ""}) {
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"cannot be the name of a dataset"}, [&] {
      ShardStoreTarget(dir / "a", {{.name = name, .dtype = DType::kU8, .shape = {1}}}, {});
    }));
  }
}

TEST(ChunkShape, CutsColumnsFirstAndNeverExceedsTheSize) {
  EXPECT_EQ(chunk_shape({4096, 4096}, DType::kBF16, 1 << 20), (Shape{512, 1024}));
  EXPECT_EQ(chunk_shape({128256, 4096}, DType::kBF16, 1 << 20), (Shape{1018, 512}));
  EXPECT_EQ(chunk_shape({100}, DType::kBF16, 1 << 20), (Shape{100}));
  EXPECT_EQ(chunk_shape({3 << 20}, DType::kU8, 1 << 20), (Shape{1 << 20}));
  EXPECT_EQ(chunk_shape({8, 64, 64}, DType::kBF16, 1 << 20), (Shape{8, 64, 64}));
  Random random(9);
  for (int i = 0; i < 2000; ++i) {
    const auto shape =
        support::random_shape(random, static_cast<int>(random.between(1, 4)), 1, 3000);
    const auto bytes = random.between(8, 1 << 20);
    const auto chunk = chunk_shape(shape, DType::kF64, bytes);
    ASSERT_LE(8 * chunk.product(), bytes);
    for (int d = 0; d < shape.rank(); ++d) {
      ASSERT_GE(chunk[d], 1);
      ASSERT_LE(chunk[d], shape[d]);
    }
  }
}

}  // namespace shard_store_test
}  // namespace ferry::distckpt
