// The GPUs that replicas of a machine's ranks are on: those that replicas.devices names, in turn,
// or else those on which no rank is. On the host there are none, and all of it is 0.
#pragma once

#include <cstddef>
#include <vector>

#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"

namespace ferry::trainer {

// The first of ranks that answer the same prompts, of all of them: it has the replicas.
std::vector<int> first_ranks(const PpoConfig& config, int world_size);

struct ReplicaDevices {
  std::vector<int> all{};         // that replicas of this machine take in turn
  int num_ranks = 0;              // of this machine: on its first GPUs
  std::size_t num_replicas = 0;   // that ranks of this machine start
  std::size_t num_of_others = 0;  // those of ranks before this one

  // The GPU of a replica that this rank starts.
  int of_slot(std::size_t slot) const;
  // The share of the GPU's free memory that a replica may fill. 0 where a rank is on it: its cache
  // then has kv_cache_bytes.
  double memory_utilization(int gpu) const;
};

// `num_gpus`: of this machine. Throws Error(kUsage) if replicas that are to be started have no GPU.
ReplicaDevices replica_devices(const PpoConfig& config, const models::World& world, int num_gpus);

}  // namespace ferry::trainer
