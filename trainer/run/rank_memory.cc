#include "trainer/run/rank_memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "models/device/memory_error.h"
#include "trainer/config/ppo_rules.h"
#include "trainer/engine/out_of_memory.h"
#include "trainer/run/all_ranks.h"

namespace ferry::trainer {
RankMemory::RankMemory(const RolloutConfig& rollout, models::World& world)
    : rollout_(rollout), world_(world) {}

void RankMemory::add(const MegatronEngine* role) {
  if (role != nullptr) roles_.push_back(role);
}

std::string RankMemory::ways(const StepPhase& phase) const {
  std::vector<std::string> held, ways;
  const bool on_gpu = world_.device().is_cuda();
  for (const auto* const role : roles_) {
    const auto& offload = role->offload();
    const auto& options = role->options();
    const auto& section = options.memory.engine;
    std::int64_t bytes = 0;
    const auto add = [&](std::int64_t part, const char* key, bool in_use) {
      bytes += part;
      if (on_gpu && !in_use && part > 0)
        ways.push_back(fmt::format("{}.{}=true, for {}", section, key, in_words(part)));
    };
    const bool in_use = options.role == phase.role;
    add(offload.params().device_bytes(), "param_offload", in_use);
    add(offload.grads().device_bytes(), "grad_offload", in_use);
    add(role->trains() ? role->optimizer().device_bytes() : 0, "optimizer_offload", false);
    held.push_back(fmt::format("{} of {}", in_words(bytes), name_of(options.role)));
  }
  const auto& ranks = rollout_.ranks;
  if (ranks.empty() || std::ranges::find(ranks, world_.rank()) != ranks.end()) {
    if (!rollout_.free_cache_engine) ways.push_back(kRolloutSection + ".free_cache_engine=true");
    ways.push_back(on_gpu ? fmt::format("{}.gpu_memory_utilization below {}", kRolloutSection,
                                        rollout_.gpu_memory_utilization.value_or(1))
                          : fmt::format("{}.kv_cache_bytes below {}", kRolloutSection,
                                        rollout_.kv_cache_bytes));
  }
  return fmt::format("this rank keeps {}{}{}", fmt::join(held, ", "),
                     held.empty() ? "nothing of other roles" : "",
                     ways.empty() ? "" : fmt::format("; room: {}", fmt::join(ways, "; or ")));
}

void RankMemory::run(const StepPhase& phase, const std::function<void()>& body) const {
  allocating(
      world_.device(),
      [&] {
        return Buffer{.name = phase.name, .what_fits = [&](std::int64_t) { return ways(phase); }};
      },
      [&] {
        try {
          body();
        } catch (models::OutOfMemory& error) {  // of a buffer whose own settings it names
          error.set_hint(
              fmt::format("{}{}{}", error.hint(), error.hint().empty() ? "" : "; ", ways(phase)));
          throw;
        }
      });
}

std::vector<std::string> RankMemory::expect() const {
  std::vector<std::string> mine;
  for (const auto* const role : roles_) {
    const auto& offload = role->offload();
    const auto returning = offload.params().host_bytes() + offload.grads().host_bytes();
    const auto note = role->memory().expect(!role->trains(), room(world_.device()) - returning);
    if (!note.empty()) mine.push_back(fmt::format("{}: {}", name_of(role->options().role), note));
  }
  return gather_notes(all_ranks(world_, "memory"), mine);
}

}  // namespace ferry::trainer
