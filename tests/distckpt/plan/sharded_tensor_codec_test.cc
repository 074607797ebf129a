#include "distckpt/plan/sharded_tensor_codec.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"

namespace ferry::distckpt {
namespace sharded_tensor_codec_test {

using support::fails;
using support::Random;

std::vector<ShardedTensor> random_tensors(Random& random) {
  std::vector<ShardedTensor> tensors;
  const auto count = random.between(0, 12);
  for (std::int64_t i = 0; i < count; ++i) {
    ShardedTensor tensor{.key = fmt::format("decoder.layers.{}.mlp.linear_fc{}.weight",
                                            random.between(0, 120), random.between(1, 2)),
                         .dtype = static_cast<DType>(random.between(0, 11))};
    const auto rank = static_cast<int>(random.between(0, kMaxRank));
    tensor.global_shape = support::random_shape(random, rank, 1, 1000);
    const auto box = support::random_box(random, tensor.global_shape);
    tensor.global_offset = box.offset;
    tensor.local_shape = box.size;
    while (tensor.local_shape.rank() > 0 && tensor.local_shape[0] == 1) {
      tensor.local_shape = tensor.local_shape.drop_front(1);
      ++tensor.prepend_axis_num;
    }
    for (auto ids = random.between(0, 3); ids > 0; --ids)
      tensor.replica_id.push_back(static_cast<int>(random.between(0, 300)));
    if (random.chance(10)) tensor.flattened_range = {random.between(0, 9), random.between(10, 900)};
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

bool same(const ShardedTensor& a, const ShardedTensor& b) {
  return a.key == b.key && a.dtype == b.dtype && a.local_shape == b.local_shape &&
         a.global_shape == b.global_shape && a.global_offset == b.global_offset &&
         a.prepend_axis_num == b.prepend_axis_num && a.replica_id == b.replica_id &&
         a.flattened_range == b.flattened_range;
}

class RandomShardedTensors : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, RandomShardedTensors, RandomShardedTensors::all());

TEST_P(RandomShardedTensors, AreGivenBackAsTheyWereEncoded) {
  for_each_seed(1, 300, [&](std::uint64_t seed) {
    Random random(seed);
    const auto tensors = random_tensors(random);
    const auto found = decode_sharded_tensors(encode_sharded_tensors(tensors), "rank 1");
    ASSERT_EQ(found.size(), tensors.size());
    for (std::size_t i = 0; i < found.size(); ++i) ASSERT_TRUE(same(found[i], tensors[i])) << i;
  });
}

TEST(ShardedTensorCodec, TakesFewBytesForManyLayers) {
  std::vector<ShardedTensor> tensors;
  for (int layer = 0; layer < 100; ++layer) {
    tensors.push_back({.key = fmt::format("decoder.layers.{}.mlp.linear_fc1.weight", layer),
                       .local_shape = {1024, 4096},
                       .global_shape = {8192, 4096},
                       .global_offset = {1024, 0},
                       .replica_id = {0, 0, 0}});
  }
  EXPECT_LT(encode_sharded_tensors(tensors).size(), 100 * 48);
}

TEST(ShardedTensorCodec, RefusesWhatIsCutShortOrGoesOn) {
  Random random(7);
  auto tensors = random_tensors(random);
  while (tensors.empty()) tensors = random_tensors(random);
  const auto bytes = encode_sharded_tensors(tensors);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_TRUE(fails(ErrorKind::kCorrupt, {"rank 5", "byte"}, [&] {
      decode_sharded_tensors(bytes.substr(0, size), "rank 5");
    })) << size;
  }
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"something follows"},
                    [&] { decode_sharded_tensors(bytes + '\0', "rank 5"); }));
}

TEST_P(RandomShardedTensors, WithChangedBytesAreValidOrAnError) {
  for_each_seed(1, 2000, [&](std::uint64_t seed) {
    Random random(seed);
    auto bytes = encode_sharded_tensors(random_tensors(random));
    for (auto changes = random.between(1, 3); changes > 0; --changes) {
      const auto at = static_cast<std::size_t>(random.between(0, std::ssize(bytes) - 1));
      bytes[at] = static_cast<char>(random.between(0, 255));
    }
    try {
      for (const auto& tensor : decode_sharded_tensors(bytes, "rank")) tensor.validate();
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kCorrupt) << error.what();
    }
  });
}

TEST(ShardedTensorCodec, RefusesToEncodeABoxOutsideItsTensor) {
  const ShardedTensor tensor{
      .key = "w", .local_shape = {3}, .global_shape = {4}, .global_offset = {2}};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "2:5"},
                    [&] { encode_sharded_tensors(std::vector{tensor}); }));
}

}  // namespace sharded_tensor_codec_test
}  // namespace ferry::distckpt
