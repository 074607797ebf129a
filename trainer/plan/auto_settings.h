// The settings that a configuration leaves to the plan of its run, "auto": what rests on the host
// (auto_offload.h), tokens of micro-batches, recomputation, the rollout's share of a GPU's memory.
// Pure functions of the configuration, of the least figures of the run's devices (slowest_of()) and
// of its hosts' memory, so that all ranks choose alike.
//
// On a GPU micro-batches are as large as they may be, up to 16,384 tokens or what the longest
// sequence needs. No layer is computed again if they have 4,096 so, of a dense model 2,048; else as
// few as possible for them to have 4,096. On the host both are what they were without a plan, where
// that fits.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "models/spec/transformer_config.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/sft_config.h"
#include "trainer/plan/host_misfits.h"
#include "trainer/plan/run_setup.h"

namespace ferry::trainer {

// A configuration without "auto", and what was chosen, as overrides: "optim.lr=1e-05".
template <typename Config>
struct Chosen {
  Config config{};
  std::vector<std::string> settings{};
  std::vector<std::string> offload{};  // reasons: ChosenOffload
};

// A role that does not fit at all gets the smallest settings that there are. `hosts`: the ranks'
// shares of their hosts; none: the hosts have all that it takes. Throw Error(kUsage) as setup_of()
// does.
Chosen<SftConfig> choose_settings(const SftConfig& config,
                                  const models::TransformerConfig& model,
                                  int world_size,
                                  const DeviceSpec& device,
                                  std::span<const HostShare> hosts = {});
Chosen<PpoConfig> choose_settings(const PpoConfig& config,
                                  const ModelsOfRun& models,
                                  int world_size,
                                  const DeviceSpec& device,
                                  std::span<const HostShare> hosts = {});

}  // namespace ferry::trainer
