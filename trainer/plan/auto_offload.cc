#include "trainer/plan/auto_offload.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "trainer/plan/memory_advice.h"

namespace ferry::trainer {
namespace {

using Keys = std::vector<OffloadKey>;

// A run that fits as it is must gain more than what the plan may err by.
constexpr double kWorthwhile = 0.85;  // of its step's seconds

double moved_by(const Keys& keys) {
  double bytes = 0;
  for (const auto& key : keys) bytes += key.moved;
  return bytes;
}

// All but none of them: those that move the fewest bytes first, of equals the fewest keys.
std::vector<Keys> combinations_of(const Keys& open) {
  std::vector<Keys> all;
  for (std::size_t bits = 1; bits < std::size_t{1} << open.size(); ++bits) {
    Keys some;
    for (std::size_t i = 0; i < open.size(); ++i)
      if ((bits >> i & 1) != 0) some.push_back(open[i]);
    all.push_back(std::move(some));
  }
  std::ranges::stable_sort(all, {},
                           [](const Keys& keys) { return std::pair(moved_by(keys), keys.size()); });
  return all;
}

std::string names_of(const Keys& keys) {
  std::vector<std::string> names;
  for (const auto& key : keys) names.push_back(key.key);
  return fmt::format("{}", fmt::join(names, " and "));
}

std::int64_t pinned_by(const RunPlan& plan) {
  std::int64_t bytes = 0;
  for (const auto& group : plan.ranks)
    bytes += plan.most_bytes(group.ranks.front(), &PhaseBytes::host) *
             static_cast<std::int64_t>(group.ranks.size());
  return bytes;
}

// The phase that lacks the most memory.
std::pair<std::string, std::int64_t> worst_phase(const RunPlan& plan) {
  std::pair<std::string, std::int64_t> worst;
  for (const auto& group : plan.ranks) {
    for (const auto& phase : group.phases)
      if (phase.bytes.on_device() > worst.second) worst = {phase.name, phase.bytes.on_device()};
  }
  return worst;
}

// Says that a key is needed by a run that `without` is the plan of if it is false.
std::string reason_for(const OffloadKey& key, const RunPlan& without, double seconds) {
  const auto what = fmt::format("{}, {},", key.part, in_words(key.bytes));
  if (without.fits())
    return fmt::format("{} leave room that saves time: a step takes {:.1f} s instead of {:.1f}",
                       what, seconds, without.step_seconds());
  const auto [phase, bytes] = worst_phase(without);
  if (bytes <= without.memory)
    return fmt::format("{} would leave no room for the cache of a sequence", what);
  return fmt::format("{} do not fit beside the other {} of {} into {}", what,
                     in_words(std::max<std::int64_t>(bytes - key.bytes, 0)), phase,
                     in_words(without.memory));
}

// Says that keys fit the devices, but not a host.
std::string reason_against(const RunSetup& setup, const Keys& keys, const std::string& misfit) {
  const bool could_halve = std::ranges::any_of(keys, [&](const OffloadKey& key) {
    const auto& moments = setup.roles[key.role].memory.dtypes;
    return key.value == &EngineConfig::optimizer_offload &&
           moments.exp_avg == distckpt::DType::kF32 && moments.exp_avg_sq == moments.exp_avg;
  });
  return fmt::format("{} would fit the devices, but {}{}", names_of(keys), misfit,
                     could_halve
                         ? "; moments in bfloat16 (optim.exp_avg_dtype and exp_avg_sq_dtype) make "
                           "masters and moments two thirds of that"
                         : "");
}

}  // namespace

std::vector<OffloadKey> open_offload_keys(const RunSetup& setup) {
  Keys keys;
  if (setup.device.on_host) return keys;
  const auto groups = rank_groups(setup);
  for (std::size_t i = 0; i < setup.roles.size(); ++i) {
    const auto& role = setup.roles[i];
    models::ModelMemory most;
    for (const auto& group : groups) {
      if (!group.models[i]) continue;
      const auto memory = group.models[i]->memory(role.trains);
      most.parameters = std::max(most.parameters, memory.parameters);
      most.gradients = std::max(most.gradients, memory.gradients);
      most.optimizer = std::max(most.optimizer, memory.optimizer);
    }
    const auto add = [&](std::optional<bool> EngineConfig::*value, const char* name,
                         const char* part, std::int64_t bytes, std::int64_t passes) {
      if (!(role.engine.*value).has_value() && bytes > 0)
        keys.push_back({.role = i,
                        .value = value,
                        .key = fmt::format("{}.{}", role.memory.engine, name),
                        .part = fmt::format("{} of {}", part, name_of(role.role)),
                        .bytes = bytes,
                        .moved = static_cast<double>(bytes) * static_cast<double>(passes)});
    };
    const bool actor = role.role == Role::kActor;
    // Training alone has no phase in which they could rest.
    if (setup.rollout) {
      add(&EngineConfig::grad_offload, "grad_offload", "gradients", most.gradients, 0);
      if (!actor || !setup.rollout->shares_memory)
        add(&EngineConfig::param_offload, "param_offload", "parameters", most.parameters, 2);
    }
    add(&EngineConfig::optimizer_offload, "optimizer_offload", "masters and moments",
        most.optimizer, 2 * role.updates);
  }
  return keys;
}

ChosenOffload choose_offload(const RunSetup& setup,
                             std::span<const HostShare> hosts,
                             const PlanOffload& plan_with) {
  const auto open = open_offload_keys(setup);
  if (open.empty()) return {};
  auto least = plan_with({});  // of those that do not fit, the one that lacks least
  const bool fits = least.fits();
  std::optional<Keys> best;
  double seconds =
      fits ? kWorthwhile * least.step_seconds() : std::numeric_limits<double>::infinity();
  std::optional<Keys> refused;  // by a host alone: the one that pins least
  std::int64_t pinned = std::numeric_limits<std::int64_t>::max();
  std::string misfit;
  for (const auto& keys : combinations_of(open)) {
    const auto plan = plan_with(keys);
    if (!plan.fits()) {
      if (worst_phase(plan).second < worst_phase(least).second) least = plan;
      continue;
    }
    const auto misfits = host_misfits(plan, hosts);
    if (misfits.empty() && plan.step_seconds() < seconds) {
      best = keys;
      seconds = plan.step_seconds();
    } else if (!misfits.empty() && pinned_by(plan) < pinned) {
      refused = keys;
      pinned = pinned_by(plan);
      misfit = misfits.front();
    }
  }
  if (!best && fits) return {};
  if (!best) {
    if (refused) return {.reasons = {reason_against(setup, *refused, misfit)}};
    const auto [phase, bytes] = worst_phase(least);
    return {.reasons = {
                fmt::format("none suffices: with all that can rest on the host {} takes {} of {}",
                            phase, in_words(bytes), in_words(least.memory))}};
  }
  ChosenOffload chosen{.rests = *best};
  for (std::size_t i = 0; i < best->size(); ++i) {
    auto others = *best;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    chosen.reasons.push_back(reason_for((*best)[i], plan_with(others), seconds));
  }
  return chosen;
}

}  // namespace ferry::trainer
