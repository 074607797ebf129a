#include "trainer/run/planned_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
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
#include "trainer/plan/run_plan.h"

namespace ferry::trainer {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(HostShare, host, pinned, available)

namespace {

std::vector<int> all_ranks(const models::World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The ranks' device, with the least memory that one of them has. Called by all.
DeviceSpec device_of(models::World& world) {
  const auto device = world.device();
  DeviceSpec spec{.name = "host", .on_host = true};
  if (device.is_cuda()) {
    spec = find_device(models::device_name(device)).value_or(DeviceSpec{.name = "GPU"});
  }
  const auto mine = models::total_memory(device).value_or(host_room());
  spec.memory =
      std::ranges::min(models::gather(models::ProcessGroup(world, "plan", all_ranks(world)), mine));
  return spec;
}

// The ranks' shares of their hosts, before any of it is pinned. Called by all.
std::vector<HostShare> hosts_of(models::World& world) {
  return models::gather(models::ProcessGroup(world, "hosts", all_ranks(world)),
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

template <typename Config, typename Models>
Config plan_and_say(const Config& config,
                    const Models& models,
                    models::World& world,
                    const std::function<void(const std::string&)>& say) {
  const auto device = device_of(world);
  const auto hosts = device.on_host ? std::vector<HostShare>() : hosts_of(world);
  const auto chosen = choose_settings(config, models, world.size(), device, hosts);
  if (world.rank() == 0 && !chosen.settings.empty())
    say(fmt::format("chosen     {}", fmt::join(chosen.settings, " ")));
  if (world.rank() == 0)
    for (const auto& reason : chosen.offload) say("offload    " + reason);
  if (device.on_host) return chosen.config;
  const auto setup = setup_of(chosen.config, models, world.size(), device);
  const auto plan = plan_run(setup);
  check_hosts(plan, hosts);
  leave_room(plan, world);
  if (world.rank() != 0) return chosen.config;
  std::int64_t most = 0;
  std::string where;
  for (const auto& group : plan.ranks) {
    for (const auto& phase : group.phases) {
      if (phase.bytes.on_device() <= most) continue;
      most = phase.bytes.on_device();
      where = phase.name;
    }
  }
  say(fmt::format(
      "plan       {} of {} in {}{}", in_words(most), in_words(plan.memory), where,
      plan.seconds.empty() ? "" : fmt::format(", {:.1f} s a step", plan.step_seconds())));
  for (const auto& misfit : plan.misfits) say("memory     " + misfit);
  if (const auto misfit = replica_misfit(setup, plan)) say("memory     " + *misfit);
  return chosen.config;
}

}  // namespace

SftConfig planned(const SftConfig& config,
                  const converter::Checkpoint& origin,
                  models::World& world,
                  const std::function<void(const std::string&)>& say) {
  return plan_and_say(config, origin.map.config, world, say);
}

PpoConfig planned(const PpoConfig& config,
                  const converter::Checkpoint& origin,
                  models::World& world,
                  const std::function<void(const std::string&)>& say) {
  const auto of = [&](const ModelConfig& model) {
    return model.path.empty() ? origin.map.config : open_checkpoint(model)->map.config;
  };
  return plan_and_say(config,
                      ModelsOfRun{.actor = origin.map.config,
                                  .critic = converter::with_value_head(of(config.critic.model)),
                                  .reward = of(config.reward.model)},
                      world, say);
}

}  // namespace ferry::trainer
