#include "converter/optimizer/optimizer_records.h"

#include <gtest/gtest.h>

namespace ferry::converter {
namespace optimizer_records_test {

TEST(OptimizerRecords, AChainsNumberIsTakenOff) {
  std::string_view key = "chained_1.optimizer.state";
  EXPECT_EQ(strip_chain(key), 1);
  EXPECT_EQ(key, "optimizer.state");
}

TEST(OptimizerRecords, AKeyOutsideOfAChainIsOfTheFirst) {
  std::string_view key = "optimizer.state";
  EXPECT_EQ(strip_chain(key), 0);
  EXPECT_EQ(key, "optimizer.state");
}

TEST(OptimizerRecords, AGroupsKeySaysOptimizerAndRank) {
  const auto key = parse_group_key(
      "chained_1.optimizer.distributed.dp_group_idx_3.param_state/shard_0_1", "param_state");
  ASSERT_TRUE(key.has_value());
  EXPECT_EQ(key->optimizer, 1);
  EXPECT_EQ(key->rank, 3);
}

TEST(OptimizerRecords, AnotherNameIsNoGroupsKey) {
  EXPECT_FALSE(
      parse_group_key("optimizer.distributed.dp_group_idx_3.other/shard_0_1", "param_state"));
  EXPECT_FALSE(
      parse_group_key("optimizer.distributed.dp_group_idx_x.param_state/shard_0_1", "param_state"));
}

TEST(OptimizerRecords, ABucketsKeySaysBufferBucketAndKind) {
  const auto key = parse_bucket_key(
      "optimizer.distributed.dp_group_idx_2.gbuf_idx_1.dtype_(torch.bfloat16, torch.float32)"
      ".bucket_idx_4.exp_avg");
  ASSERT_TRUE(key.has_value());
  EXPECT_EQ(key->group.rank, 2);
  EXPECT_EQ(key->buffer, 1);
  EXPECT_EQ(key->bucket, 4);
  EXPECT_EQ(key->kind, "exp_avg");
}

TEST(OptimizerRecords, ABucketWithoutAKindIsNone) {
  EXPECT_FALSE(parse_bucket_key(
      "optimizer.distributed.dp_group_idx_2.gbuf_idx_1.dtype_(a, b).bucket_idx_4"));
}

}  // namespace optimizer_records_test
}  // namespace ferry::converter
