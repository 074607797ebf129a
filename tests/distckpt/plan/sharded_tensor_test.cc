#include "distckpt/plan/sharded_tensor.h"

#include <gtest/gtest.h>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace sharded_tensor_test {

using support::fails;

// Layer 17's linear_fc2 on rank 3 of TP8: columns 1536:2048 of 4096, of 32 stacked layers.
ShardedTensor make_shard() {
  return {.key = "decoder.layers.mlp.linear_fc2.weight",
          .local_shape = {1024, 512},
          .global_shape = {32, 1024, 4096},
          .global_offset = {17, 0, 1536},
          .prepend_axis_num = 1};
}

TEST(ShardedTensor, BoxHasThePrependedAxes) {
  EXPECT_EQ(to_string(make_shard().box()), "[17:18, 0:1024, 1536:2048]");
  EXPECT_NO_THROW(make_shard().validate());
  ShardedTensor scalar{.key = "step"};
  EXPECT_EQ(scalar.box(), Box{});
  EXPECT_NO_THROW(scalar.validate());
}

TEST(ShardedTensor, ValidateNamesTheDimensionThatOverflows) {
  auto shard = make_shard();
  shard.global_offset = {17, 0, 3600};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc2", "dimension 2", "3600:4112", "4096"},
                    [&] { shard.validate(); }));
  shard.global_offset = {32, 0, 0};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"dimension 0", "32:33"}, [&] { shard.validate(); }));
  shard.global_offset = {0, -1, 0};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"dimension 1"}, [&] { shard.validate(); }));
}

TEST(ShardedTensor, ValidateRefusesShapesOfOtherRank) {
  auto shard = make_shard();
  shard.prepend_axis_num = 0;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc2", "0 prepended"}, [&] { shard.validate(); }));
  shard = make_shard();
  shard.global_offset = {17, 0};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"linear_fc2"}, [&] { shard.validate(); }));
}

TEST(ShardedTensor, MainReplicaIsTheOneOfZeros) {
  auto shard = make_shard();
  EXPECT_TRUE(shard.is_main_replica());
  shard.replica_id = {0, 0, 0};
  EXPECT_TRUE(shard.is_main_replica());
  shard.replica_id = {0, 1, 0};
  EXPECT_FALSE(shard.is_main_replica());
}

TEST(ShardedObject, UniqueKeyThereAndBackIsTheSame) {
  const ShardedObject object{.key = "decoder.layers.mlp.linear_fc1._extra_state",
                             .global_shape = {2, 4},
                             .global_offset = {1, 3}};
  EXPECT_EQ(object.unique_key(), "decoder.layers.mlp.linear_fc1._extra_state/shard_1.3_2.4");
  const auto back = parse_unique_key(object.unique_key());
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->key, object.key);
  EXPECT_EQ(back->global_shape, object.global_shape);
  EXPECT_EQ(back->global_offset, object.global_offset);
  EXPECT_EQ(parse_unique_key("a/shard_x/shard_0_1")->key, "a/shard_x");
}

TEST(ShardedObject, RefusesKeysThatAreNone) {
  for (const char* text :
       {"", "a", "a/shard_", "a/shard_0", "a/shard_0_", "a/shard__1", "a/shard_0.0_1",
        "a/shard_1_1", "a/shard_-1_4", "a/shard_0_4x", "a/shard_0._4.4",
        "a/shard_0.0.0.0.0.0.0_1.1.1.1.1.1.1", "a/shard_0_4_4"}) {
    EXPECT_FALSE(parse_unique_key(text)) << text;
  }
}

}  // namespace sharded_tensor_test
}  // namespace ferry::distckpt
