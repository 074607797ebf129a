#include "trainer/run/planned_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <sstream>
#include <utility>
#include <vector>

#include "converter/bridge/load.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/distributed/messages.h"
#include "models/distributed/process_group.h"
#include "trainer/engine/host_room.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/performance.h"
#include "trainer/plan/auto_settings.h"
#include "trainer/plan/host_misfits.h"
#include "trainer/plan/plan_text.h"
#include "trainer/run/all_ranks.h"
#include "trainer/run/config_agreement.h"

namespace ferry::trainer {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostShare, host, pinned, available)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    DeviceSpec, name, memory, flops, memory_rate, link_rate, host_rate, on_host)

namespace {

// The device that stands for those of all ranks. Called by all.
DeviceSpec device_of(models::World& world) {
  const auto device = world.device();
  DeviceSpec mine{.name = "host", .on_host = true};
  if (device.is_cuda())
    mine = find_device(models::device_name(device)).value_or(DeviceSpec{.name = "GPU"});
  mine.memory = models::total_memory(device).value_or(host_room());
  return slowest_of(models::gather(all_ranks(world, "plan"), mine));
}

// The ranks' shares of their hosts, before any of it is pinned. Called by all.
std::vector<HostShare> hosts_of(models::World& world) {
  return models::gather(all_ranks(world, "hosts"),
                        HostShare{.host = host_name(), .available = host_room()});
}

void check_hosts(const RunPlan& plan, const std::vector<HostShare>& hosts) {
  const auto misfits = host_misfits(plan, hosts);
  if (misfits.empty()) return;
  throw models::OutOfMemory(
      ErrorKind::kDevice, fmt::format("{}", fmt::join(misfits, "; ")),
      "fewer ranks on a host, moments of half the size (optim.exp_avg_dtype and "
      "exp_avg_sq_dtype, \"bfloat16\"), or less that rests there (param_offload, grad_offload, "
      "optimizer_offload, async_save)");
}

// Leaves to CUDA, NCCL and replicas what the plan says that they take on this rank's device: NCCL
// allocates a little now and then for as long as a run lasts, and a device that LibTorch has all of
// fails it then.
void leave_room(const RunPlan& plan, const models::World& world) {
  const auto others = plan.most_bytes(world.rank(), &PhaseBytes::context) +
                      plan.most_bytes(world.rank(), &PhaseBytes::replicas);
  const auto total = models::total_memory(world.device()).value_or(0);
  models::leave_free(world.device(), others + total / 64);
}

void say_family(const converter::Checkpoint& model,
                const models::World& world,
                const std::function<void(const std::string&)>& say) {
  const auto family = converter::family_by_arguments(model, "hf_config_path");
  if (world.rank() == 0 && !family.empty()) say("family     " + family);
}

void say_lines(const std::string& text, const std::function<void(const std::string&)>& say) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) say(line);
}

template <typename Config, typename Models>
Planned<Config> plan_and_say(const Config& config,
                             const Models& models,
                             models::World& world,
                             const std::function<void(const std::string&)>& say) {
  constexpr std::size_t kMostGroups = 4;  // of ranks, that are said
  const auto device = device_of(world);
  const auto hosts = device.on_host ? std::vector<HostShare>() : hosts_of(world);
  auto chosen = choose_settings(config, models, world.size(), device, hosts);
  require_agreement(values_of(chosen.config), world);
  PlannedRun run{.setup = setup_of(chosen.config, models, world.size(), device),
                 .choice = {.settings = chosen.settings, .offload = chosen.offload}};
  run.plan = plan_run(run.setup);
  if (world.rank() == 0) say_lines(plan_text(run, kMostGroups), say);
  if (!device.on_host) {
    check_hosts(run.plan, hosts);
    leave_room(run.plan, world);
    if (world.rank() == 0) {
      for (const auto& misfit : run.plan.misfits) say("memory     " + misfit);
      if (const auto misfit = replica_misfit(run.setup, run.plan)) say("memory     " + *misfit);
    }
  }
  return {.config = std::move(chosen.config), .text = plan_text(run)};
}

}  // namespace

Planned<SftConfig> planned(const SftConfig& config,
                           const converter::Checkpoint& origin,
                           models::World& world,
                           const std::function<void(const std::string&)>& say) {
  say_family(origin, world, say);
  return plan_and_say(config, origin.map.config, world, say);
}

Planned<PpoConfig> planned(const PpoConfig& config,
                           const converter::Checkpoint& origin,
                           models::World& world,
                           const std::function<void(const std::string&)>& say) {
  say_family(origin, world, say);
  const auto of = [&](const ModelConfig& model) {
    if (model.path.empty()) return origin.map.config;
    const auto own = open_checkpoint(model);
    say_family(*own, world, say);
    return own->map.config;
  };
  return plan_and_say(config,
                      ModelsOfRun{.actor = origin.map.config,
                                  .critic = converter::with_value_head(of(config.critic.model)),
                                  .reward = of(config.reward.model)},
                      world, say);
}

}  // namespace ferry::trainer
