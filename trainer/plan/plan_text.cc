#include "trainer/plan/plan_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <iterator>

#include "trainer/plan/memory_advice.h"

namespace ferry::trainer {
namespace {

std::string in_gib(std::int64_t bytes) {
  return bytes == 0 ? "-" : fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 30));
}

// A line for each role, in columns: "actor      ranks 0-3  TP 2  PP 1  CP 1  EP 1  DP 2".
std::string meshes_text(const RunSetup& setup) {
  struct Line {
    std::string role{};
    std::string ranks{};
    std::string mesh{};
  };
  std::vector<Line> lines;
  for (const auto& role : setup.roles)
    lines.push_back({name_of(role.role), in_words(role.ranks), mesh_text(role.mesh())});
  if (setup.rollout)
    lines.push_back({"rollout", in_words(setup.rollout->ranks),
                     mesh_text(setup.rollout->mesh()) +
                         (setup.rollout->shares_memory ? ", in the actor's memory" : "")});
  std::size_t width = 0;
  for (const auto& line : lines) width = std::max(width, line.ranks.size());
  std::string text;
  for (const auto& [role, ranks, mesh] : lines)
    text += fmt::format("{:<10} {:<{}}  {}\n", role, ranks, width, mesh);
  return text;
}

std::int64_t most_on_device(const RankPlan& group) {
  std::int64_t most = 0;
  for (const auto& phase : group.phases) most = std::max(most, phase.bytes.on_device());
  return most;
}

// The parts that have something in any phase.
auto parts_of(const RunPlan& plan) {
  std::vector<decltype(kDeviceParts)::value_type> parts;
  std::ranges::copy_if(kDeviceParts, std::back_inserter(parts), [&](const auto& part) {
    return std::ranges::any_of(plan.ranks, [&](const RankPlan& group) {
      return std::ranges::any_of(
          group.phases, [&](const PhasePlan& phase) { return phase.bytes.*part.second > 0; });
    });
  });
  return parts;
}

// The least that the device of one of the fullest groups holds.
std::int64_t fullest_from(const RunPlan& plan, std::size_t most_groups) {
  if (plan.ranks.size() <= most_groups) return 0;
  std::vector<std::int64_t> fullest;
  for (const auto& group : plan.ranks) fullest.push_back(most_on_device(group));
  std::ranges::sort(fullest, std::greater{});
  return fullest[most_groups - 1];
}

std::string groups_text(const RunPlan& plan, std::size_t most_groups) {
  const auto parts = parts_of(plan);
  const auto shown_from = fullest_from(plan, most_groups);
  std::string text;
  std::size_t shown = 0;
  for (const auto& group : plan.ranks) {
    if (shown == most_groups || most_on_device(group) < shown_from) continue;
    ++shown;
    text += fmt::format("\n{}: {}; GiB\n{:<17}", in_words(group.ranks),
                        fmt::join(group.parts, "; "), "phase");
    for (const auto& [name, member] : parts) text += fmt::format("{:>12}", name);
    text += fmt::format("{:>9}{:>9}\n", "total", "host");
    for (const auto& phase : group.phases) {
      text += fmt::format("{:<17}", phase.name);
      for (const auto& [name, member] : parts)
        text += fmt::format("{:>12}", in_gib(phase.bytes.*member));
      text +=
          fmt::format("{:>9}{:>9}{}\n", in_gib(phase.bytes.on_device()), in_gib(phase.bytes.host),
                      phase.bytes.on_device() > plan.memory ? "  does not fit" : "");
    }
  }
  if (shown < plan.ranks.size())
    text += fmt::format("\n{} more groups of ranks take no more\n", plan.ranks.size() - shown);
  return text;
}

}  // namespace

double tokens_per_second(const PlannedRun& run) {
  return static_cast<double>(run.plan.tokens) / run.plan.step_seconds() / run.setup.world_size;
}

std::string rate_text(const PlannedRun& run) {
  return fmt::format("{:.2f} s, {:.0f} tokens/s on each device", run.plan.step_seconds(),
                     tokens_per_second(run));
}

std::string mesh_text(const models::MeshShape& mesh) {
  return fmt::format("TP {}  PP {}  CP {}  EP {}  DP {}", mesh.tp(), mesh.pp(), mesh.cp(),
                     mesh.ep(), mesh.dp());
}

std::string plan_text(const PlannedRun& run, std::size_t most_groups) {
  const auto& [setup, choice, plan] = run;
  auto text = fmt::format("device     {} x {}, {} each, {} of it for the run\n", setup.world_size,
                          setup.device.name, in_words(setup.device.memory), in_words(plan.memory));
  text += meshes_text(setup);
  text += fmt::format("step       {} sequences of {} tokens\n", setup.sequences,
                      setup.longest_sequence);
  for (const auto& setting : choice.settings) text += fmt::format("chosen     {}\n", setting);
  for (const auto& reason : choice.offload) text += fmt::format("offload    {}\n", reason);
  text += groups_text(plan, most_groups);
  if (plan.seconds.empty()) return text;
  text += "\n";
  for (const auto& phase : plan.seconds)
    text += fmt::format("{:<17}{:>10.2f} s\n", phase.name, phase.seconds);
  const auto rate = rate_text(run);
  const auto width = 10 + rate.size() - rate.find(' ');  // the seconds end where those of phases do
  return text + fmt::format("{:<17}{:>{}}\n", "step", rate, width);
}

}  // namespace ferry::trainer
