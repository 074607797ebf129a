// The choice of what rests on the host, where a configuration leaves it open ("auto"): of the
// combinations that fit the devices and the hosts, the one whose step takes the fewest seconds by
// the plan; nothing in a run that fits without and would gain less than 15 %.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trainer/plan/host_misfits.h"
#include "trainer/plan/run_plan.h"
#include "trainer/plan/run_setup.h"

namespace ferry::trainer {

// A key that a role leaves open, and that makes a difference in its run.
struct OffloadKey {
  std::size_t role = 0;  // of RunSetup::roles
  std::optional<bool> EngineConfig::*value = nullptr;
  std::string key{};       // "engine.optimizer_offload"
  std::string part{};      // "masters and moments of actor"
  std::int64_t bytes = 0;  // of it on a rank, at most
  double moved = 0;        // bytes of a rank that cross the link to its host in a step
};
// None on a device that is the host itself.
std::vector<OffloadKey> open_offload_keys(const RunSetup& setup);

// Plans the run with these keys true and the other open ones false.
using PlanOffload = std::function<RunPlan(std::span<const OffloadKey> rests)>;

struct ChosenOffload {
  std::vector<OffloadKey> rests{};
  // For each key of `rests` what would not fit without it, or take longer; without any, where no
  // combination fits, the reason for that.
  std::vector<std::string> reasons{};
};

// `hosts`: the ranks' shares of their hosts; none: the hosts have all that it takes.
ChosenOffload choose_offload(const RunSetup& setup,
                             std::span<const HostShare> hosts,
                             const PlanOffload& plan_with);

}  // namespace ferry::trainer
