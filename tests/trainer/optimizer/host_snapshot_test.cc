#include "trainer/optimizer/host_snapshot.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace ferry::trainer {
namespace host_snapshot_test {

std::vector<distckpt::LocalShard> shard_of(const at::Tensor& tensor) {
  return {{.tensor = {.key = "weight"}, .data = static_cast<std::byte*>(tensor.data_ptr())}};
}

float first_of(const std::vector<distckpt::LocalShard>& shards) {
  return *reinterpret_cast<const float*>(shards[0].data);
}

TEST(HostSnapshot, TakesItsMemoryAgainWhenNobodyHasIt) {
  const auto tensor = at::full({1000}, 1.0f);
  const auto part = tensor.narrow(0, 500, 500);
  HostSnapshot snapshot;
  const std::byte* first = nullptr;
  {
    const auto taken = snapshot.take({tensor, part}, shard_of(part));
    tensor.fill_(2.0f);
    EXPECT_EQ(first_of(taken), 1.0f);
    first = taken[0].data;
  }
  const auto again = snapshot.take({tensor, part}, shard_of(part));
  EXPECT_EQ(again[0].data, first);
  EXPECT_EQ(first_of(again), 2.0f);
  tensor.fill_(3.0f);
  const auto beside = snapshot.take({tensor, part}, shard_of(part));  // `again` is still written
  EXPECT_EQ(first_of(again), 2.0f);
  EXPECT_EQ(first_of(beside), 3.0f);
}

}  // namespace host_snapshot_test
}  // namespace ferry::trainer
