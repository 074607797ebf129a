#include "trainer/replicas/replica_devices.h"

#include <algorithm>
#include <numeric>

#include "distckpt/base/error.h"
#include "trainer/config/ppo_rules.h"

namespace ferry::trainer {
namespace {

constexpr double kMostOfAGpu = 0.9;

}  // namespace

std::vector<int> first_ranks(const PpoConfig& config, int world_size) {
  auto ranks = config.rollout.ranks;
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(world_size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  const auto tp = static_cast<std::size_t>(config.rollout.tensor_model_parallel_size);
  std::vector<int> first;
  for (std::size_t i = 0; i < ranks.size(); i += tp) first.push_back(ranks[i]);
  return first;
}

int ReplicaDevices::of_slot(std::size_t slot) const {
  return all.empty() ? 0 : all[(num_of_others + slot) % all.size()];
}

double ReplicaDevices::memory_utilization(int gpu) const {
  if (gpu < num_ranks) return 0;
  std::size_t sharing = 0;
  for (std::size_t i = 0; i < num_replicas && !all.empty(); ++i)
    sharing += all[i % all.size()] == gpu ? 1 : 0;
  return kMostOfAGpu / static_cast<double>(std::max<std::size_t>(sharing, 1));
}

ReplicaDevices replica_devices(const PpoConfig& config, const models::World& world, int num_gpus) {
  const auto& replicas = config.rollout.replicas;
  if (!world.device().is_cuda()) return {};
  const int here = world.device().index(), size = world.local_size();
  ReplicaDevices devices{.all = replicas.devices, .num_ranks = size};
  for (const int gpu : devices.all)
    require(gpu < num_gpus, ErrorKind::kUsage,
            "{}.replicas.devices: GPU {} is asked for, and there are {}", kRolloutSection, gpu,
            num_gpus);
  if (replicas.devices.empty())
    for (int gpu = size; gpu < num_gpus; ++gpu) devices.all.push_back(gpu);
  if (replicas.num > 0 && devices.all.empty())
    throw Error(ErrorKind::kUsage,
                fmt::format("{}.replicas.num: the {} ranks of this machine have all of its {} GPUs",
                            kRolloutSection, size, num_gpus),
                fmt::format("{}.replicas.devices names GPUs that replicas share with ranks",
                            kRolloutSection));
  const auto num = static_cast<std::size_t>(replicas.num);
  for (const int rank : first_ranks(config, world.size())) {
    const int place = rank - (world.rank() - here);  // on this machine
    if (place < 0 || place >= size) continue;
    devices.num_replicas += num;
    if (place < here) devices.num_of_others += num;
  }
  return devices;
}

}  // namespace ferry::trainer
