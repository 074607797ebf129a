#include "trainer/replicas/replica_devices.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"

namespace ferry::trainer {
namespace replica_devices_test {

// A rank of a machine whose ranks have its first GPUs.
models::World world(int rank, int size) {
  const auto index = static_cast<c10::DeviceIndex>(rank);
  return {
      {.device = at::Device(at::kCUDA, index)}, rank, size, c10::make_intrusive<c10d::HashStore>()};
}

PpoConfig config(int num, std::vector<int> devices = {}) {
  PpoConfig made;
  made.rollout.replicas = {.num = num, .devices = std::move(devices)};
  return made;
}

std::vector<int> of_slots(const PpoConfig& config, int rank, int ranks, int gpus) {
  const auto devices = replica_devices(config, world(rank, ranks), gpus);
  std::vector<int> all;
  for (int slot = 0; slot < config.rollout.replicas.num; ++slot)
    all.push_back(devices.of_slot(static_cast<std::size_t>(slot)));
  return all;
}

TEST(ReplicaDevices, AreThoseWithoutRanks) {
  EXPECT_EQ(of_slots(config(3), 0, 1, 3), (std::vector{1, 2, 1}));
  // Two ranks have two replicas each.
  EXPECT_EQ(of_slots(config(2), 0, 2, 5), (std::vector{2, 3}));
  EXPECT_EQ(of_slots(config(2), 1, 2, 5), (std::vector{4, 2}));
}

TEST(ReplicaDevices, AreThoseThatAreNamed) {
  EXPECT_EQ(of_slots(config(3, {1, 0}), 0, 1, 2), (std::vector{1, 0, 1}));
}

// Ranks that share a model, or that do not generate, start none.
TEST(ReplicaDevices, CountTheRanksThatHaveReplicas) {
  auto shared = config(1);
  shared.rollout.tensor_model_parallel_size = 2;
  EXPECT_EQ(of_slots(shared, 0, 4, 8), std::vector{4});
  EXPECT_EQ(of_slots(shared, 2, 4, 8), std::vector{5});
  auto apart = config(1);
  apart.rollout.ranks = {1, 3};
  EXPECT_EQ(of_slots(apart, 3, 4, 8), std::vector{5});
}

TEST(ReplicaDevices, ShareTheMemoryOfAGpu) {
  const auto devices = replica_devices(config(3), world(0, 1), 3);
  EXPECT_EQ(devices.memory_utilization(1), 0.45);
  EXPECT_EQ(devices.memory_utilization(2), 0.9);
  EXPECT_EQ(devices.memory_utilization(0), 0);    // the rank's
  EXPECT_EQ(devices.memory_utilization(7), 0.9);  // of one that came by itself
}

TEST(ReplicaDevices, AreNeededByThoseThatAreStarted) {
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"the 2 ranks of this machine have all of its 2"},
                             [] { (void)replica_devices(config(1), world(0, 2), 2); }));
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"replicas.devices: GPU 2 is asked for"}, [] {
    (void)replica_devices(config(1, {1, 2}), world(0, 1), 2);
  }));
  auto elastic = config(0);
  elastic.rollout.replicas.elastic = true;
  EXPECT_EQ(replica_devices(elastic, world(0, 1), 1).memory_utilization(1), 0.9);
}

TEST(ReplicaDevices, AreNoneOnTheHost) {
  const models::World host{{}};
  EXPECT_EQ(replica_devices(config(2), host, 8).of_slot(1), 0);
}

}  // namespace replica_devices_test
}  // namespace ferry::trainer
