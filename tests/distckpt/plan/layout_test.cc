#include "distckpt/plan/layout.h"

#include <gtest/gtest.h>

#include <string>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace layout_test {

using support::fails;

TEST(Layout, FindsTensorsByTheirNames) {
  Layout layout;
  EXPECT_EQ(layout.add_tensor({.name = "a", .shape = {2, 3}}), 0U);
  EXPECT_EQ(layout.add_tensor({.name = "b", .dtype = DType::kF32, .shape = {}}), 1U);
  EXPECT_EQ(layout.find("b"), 1U);
  EXPECT_FALSE(layout.find("c").has_value());
  EXPECT_EQ(layout.num_bytes(), 2 * 3 * 2 + 4);
}

TEST(Layout, RefusesATensorThatIsThereTwiceOrOverflows) {
  Layout layout;
  layout.add_tensor({.name = "a", .shape = {2}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"a: the tensor is there twice"},
                    [&] { layout.add_tensor({.name = "a", .shape = {3}}); }));
  for (const auto& shape : {Shape{-1}, Shape{std::int64_t{1} << 62, 4},
                            Shape{std::int64_t{1} << 62}, Shape{0, std::int64_t{1} << 62, 4}}) {
    EXPECT_TRUE(fails(ErrorKind::kLayout, {"b: the shape", "overflows"}, [&] {
      layout.add_tensor({.name = "b", .dtype = DType::kF64, .shape = shape});
    })) << to_string(shape);
  }
  EXPECT_FALSE(layout.find("b").has_value());
}

TEST(DescribeStorage, NamesTheFileTheChunkOrTheRank) {
  EXPECT_EQ(describe(Storage(FileStorage{.path = "dir/a.safetensors"})), "dir/a.safetensors");
  EXPECT_EQ(describe(Storage(ChunkStorage{.path = "a.h5",
                                          .offset = 10,
                                          .encoded_size = 5,
                                          .name = "tensors/x[0:4]",
                                          .first_tensor = "x",
                                          .last_tensor = "y"})),
            "a.h5: bytes 10 to 15, the chunk tensors/x[0:4] of x to y");
  EXPECT_EQ(describe(Storage(RankStorage{.rank = 3})), "memory of rank 3");
  EXPECT_EQ(describe(Storage(MemoryStorage{})), "memory");
  EXPECT_EQ(file_of(Storage(MemoryStorage{})), nullptr);
  EXPECT_EQ(*file_of(Storage(ChunkStorage{.path = "a.h5"})), "a.h5");
}

// [2, 3, 4] in two shards of the first dimension, each of which begins a byte further on.
TensorLayout blocks() {
  TensorLayout tensor{.name = "blocks", .dtype = DType::kU8, .shape = {2, 3, 4}};
  for (std::int64_t i = 0; i < 2; ++i)
    tensor.shards.push_back(
        packed_shard({.offset = {i, 0, 0}, .size = {1, 3, 4}}, DType::kU8, 0, 13 * i));
  return tensor;
}

TEST(FoldLastDimensions, KeepsEachElementAtItsPlace) {
  auto tensor = blocks();
  fold_last_dimensions(tensor);
  EXPECT_EQ(tensor.shape, (Shape{2, 12}));
  ASSERT_EQ(tensor.shards.size(), 2U);
  EXPECT_EQ(to_string(tensor.shards[1].box), "[1:2, 0:12]");
  EXPECT_EQ(tensor.shards[1].at.offset, 13);
  EXPECT_EQ(tensor.shards[1].at.strides, (Dims{12, 1}));
}

TEST(FoldLastDimensions, RefusesRowsThatLieApart) {
  auto gaps = blocks();
  gaps.shards[0].at.strides = {24, 8, 1};
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"blocks", "lies apart"}, [&] { fold_last_dimensions(gaps); }));
  auto halves = blocks();
  halves.shards[0].box.size[2] = 2;
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"blocks", "lies apart"}, [&] { fold_last_dimensions(halves); }));
}

TEST(CheckLayout, NamesTheTensorAndTheFilesOfWhatIsMissing) {
  Layout layout;
  for (const auto* file : {"a.bin", "b.bin"}) layout.add_storage(FileStorage{.path = file});
  layout.add_tensor({.name = "whole",
                     .shape = {4},
                     .shards = {packed_shard(Box::whole({4}), DType::kBF16, 0, 0)}});
  EXPECT_NO_THROW(check_layout(layout));
  layout.add_tensor({.name = "half",
                     .shape = {4},
                     .shards = {packed_shard(Box::whole({2}), DType::kBF16, 1, 0)}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"half", "[2:4]", "while adding up what b.bin holds of it"},
                    [&] { check_layout(layout); }));
}

TEST(CheckLayout, RefusesABoxThatLeavesTheShape) {
  Layout layout;
  layout.add_storage(FileStorage{.path = "a.bin"});
  layout.add_tensor(
      {.name = "x", .shape = {4}, .shards = {packed_shard(Box::whole({5}), DType::kBF16, 0, 0)}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"a.bin: x: the box [0:5] leaves the shape [4]"},
                    [&] { check_layout(layout); }));
}

}  // namespace layout_test
}  // namespace ferry::distckpt
