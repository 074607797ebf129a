#include "converter/bridge/whole_checksums.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distckpt/elements/crc32.h"
#include "tests/support/expect.h"
#include "tests/support/memory_box_io.h"

namespace ferry::converter {
namespace whole_checksums_test {

using distckpt::DType;
using distckpt::ExpectedChecksum;
using distckpt::Shape;
using distckpt::ShardedTensor;

// A file of two tensors: `split` [4, 2], of which two ranks hold two rows each, and `norm` [2],
// which both hold whole.
class ChecksumsToRead : public testing::Test {
 protected:
  static constexpr std::int64_t kSplitBytes = 16;
  static constexpr std::int64_t kNormBytes = 4;

  ChecksumsToRead() {
    const auto file = source_.add_storage(
        distckpt::MemoryStorage{.data = bytes_.data(), .size = std::ssize(bytes_)});
    add("split", {4, 2}, file, 0);
    add("norm", {2}, file, kSplitBytes);
  }

  void add(const std::string& name, const Shape& shape, distckpt::StorageId file, std::int64_t at) {
    const auto index = static_cast<std::uint32_t>(tensors_.size());
    tensors_.push_back({.name = name, .shape = shape});
    source_.add_tensor(
        {.name = name,
         .shape = shape,
         .shards = {distckpt::packed_shard(distckpt::Box::whole(shape), DType::kBF16, file, at)}});
    map_.links.push_back(distckpt::BoxLink::whole(index, index, shape));
  }

  static std::vector<ShardedTensor> held_by(int rank, int num_ranks) {
    const auto rows = std::int64_t{4} / num_ranks;
    return {{.key = "split",
             .local_shape = {rows, 2},
             .global_shape = {4, 2},
             .global_offset = {rank * rows, 0},
             .replica_id = {0}},
            {.key = "norm",
             .local_shape = {2},
             .global_shape = {2},
             .global_offset = {0},
             .replica_id = {rank}}};
  }

  // The ranges that one of the ranks reads whole.
  std::vector<std::uint32_t> of_rank(int rank,
                                     int num_ranks,
                                     const std::vector<ExpectedChecksum>& checksums) {
    std::vector<std::vector<ShardedTensor>> ranks;
    for (int i = 0; i < num_ranks; ++i) ranks.push_back(held_by(i, num_ranks));
    std::vector<distckpt::LocalShard> mine;
    for (const auto& tensor : ranks[static_cast<std::size_t>(rank)])
      mine.push_back({.tensor = tensor, .data = memory_.data()});
    const auto mesh = distckpt::make_mesh_layout(std::move(ranks), rank, std::move(mine));
    distckpt::TensorMap target;
    for (std::uint32_t i = 0; i < tensors_.size(); ++i)
      target.links.push_back(
          distckpt::BoxLink::whole(i, *mesh.layout.find(tensors_[i].name), tensors_[i].shape));
    const auto plan = distckpt::plan_copy(tensors_, {.layout = &source_, .map = &map_},
                                          {.layout = &mesh.layout, .map = &target});
    return checksums_to_read(plan, mesh, checksums);
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(kSplitBytes + kNormBytes);
  std::vector<std::byte> memory_ = std::vector<std::byte>(kSplitBytes);
  distckpt::Layout source_;
  distckpt::TensorMap map_;
  std::vector<distckpt::ModelTensor> tensors_;
  ExpectedChecksum split_{.range = {.offset = 0, .size = kSplitBytes}, .name = "split"};
  ExpectedChecksum norm_{.range = {.offset = kSplitBytes, .size = kNormBytes}, .name = "norm"};
};

TEST_F(ChecksumsToRead, OneRankReadsWhatAllReadInParts) {
  EXPECT_EQ(of_rank(0, 2, {split_}), std::vector<std::uint32_t>{0});
  EXPECT_TRUE(of_rank(1, 2, {split_}).empty());
}

TEST_F(ChecksumsToRead, TheReadersTakeTurns) {
  const ExpectedChecksum nothing{.range = {.offset = 100, .size = 4}, .name = "nothing"};
  EXPECT_TRUE(of_rank(0, 2, {nothing, split_}).empty());
  EXPECT_EQ(of_rank(1, 2, {nothing, split_}), std::vector<std::uint32_t>{1});
}

TEST_F(ChecksumsToRead, NobodyReadsWhatARankReadsWholeAnyway) {
  EXPECT_TRUE(of_rank(0, 2, {norm_}).empty());
  EXPECT_TRUE(of_rank(1, 2, {norm_}).empty());
}

TEST_F(ChecksumsToRead, ARankAloneReadsEverythingWhole) {
  EXPECT_TRUE(of_rank(0, 1, {split_, norm_}).empty());
}

// A file of more than the block that a thread reads at a time.
class ReadChecksums : public testing::Test {
 protected:
  ReadChecksums() {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<std::byte>(i * i >> 3U);
    layout_.add_storage(distckpt::MemoryStorage{.data = bytes_.data(), .size = std::ssize(bytes_)});
    const auto whole = std::span<const std::byte>(bytes_);
    checksums_ = {{.range = {.offset = 0, .size = std::ssize(bytes_)},
                   .crc = distckpt::crc32(whole),
                   .name = "whole"},
                  {.range = {.offset = 5, .size = 9}, .crc = 7, .name = "damaged"}};
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>((std::size_t{9} << 20) + 3);
  distckpt::Layout layout_;
  std::vector<ExpectedChecksum> checksums_;
};

TEST_F(ReadChecksums, TakesARangeOfManyBlocks) {
  support::MemorySource source(layout_);
  EXPECT_NO_THROW(read_checksums(source, checksums_, {0}, 2));
  EXPECT_EQ(source.bytes_read(), std::ssize(bytes_));
}

TEST_F(ReadChecksums, NamesTheRangeWhoseBytesAreOthers) {
  support::MemorySource source(layout_);
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"bytes 5 to 14 (damaged)", "00000007"}, [&] {
    read_checksums(source, checksums_, {0, 1}, 2);
  }));
}

TEST_F(ReadChecksums, ReadsNothingThatIsNotItsTurn) {
  support::MemorySource source(layout_);
  read_checksums(source, checksums_, {}, 2);
  EXPECT_EQ(source.num_reads(), 0);
}

}  // namespace whole_checksums_test
}  // namespace ferry::converter
