#include "cli/report/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>
#include <utility>

#include "cli/report/text.h"

namespace ferry::cli {
namespace {

using nlohmann::ordered_json;
using trainer::PhaseBytes;
using trainer::RunPlan;
using trainer::RunSetup;

using Column = std::pair<std::string_view, std::int64_t PhaseBytes::*>;
constexpr auto kColumns = std::to_array<Column>({{"weights", &PhaseBytes::weights},
                                                 {"gradients", &PhaseBytes::gradients},
                                                 {"optimizer", &PhaseBytes::optimizer},
                                                 {"kv_cache", &PhaseBytes::kv_cache},
                                                 {"activations", &PhaseBytes::activations},
                                                 {"logits", &PhaseBytes::logits},
                                                 {"staging", &PhaseBytes::staging},
                                                 {"context", &PhaseBytes::context},
                                                 {"replicas", &PhaseBytes::replicas}});

std::string in_gib(std::int64_t bytes) {
  return bytes == 0 ? "-" : fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 30));
}

// The columns that have something in any phase.
std::vector<Column> columns_of(const RunPlan& plan) {
  std::vector<Column> columns;
  std::ranges::copy_if(kColumns, std::back_inserter(columns), [&](const Column& column) {
    return std::ranges::any_of(plan.ranks, [&](const trainer::RankPlan& group) {
      return std::ranges::any_of(group.phases, [&](const trainer::PhasePlan& phase) {
        return phase.bytes.*column.second > 0;
      });
    });
  });
  return columns;
}

double tokens_per_second(const RunSetup& setup, const RunPlan& plan) {
  return static_cast<double>(plan.tokens) / plan.step_seconds() / setup.world_size;
}

std::string mesh_text(const models::MeshShape& mesh) {
  return fmt::format("TP {}  PP {}  CP {}  EP {}  DP {}", mesh.tp(), mesh.pp(), mesh.cp(),
                     mesh.ep(), mesh.dp());
}

// The bytes of a rank in the phase that has the most of them.
std::int64_t most_on_device(const RunPlan& plan) {
  std::int64_t most = 0;
  for (const auto& group : plan.ranks)
    for (const auto& phase : group.phases) most = std::max(most, phase.bytes.on_device());
  return most;
}

}  // namespace

std::string meshes_text(const PlannedMeshes& meshes) {
  auto text = fmt::format("meshes     {} planned, {} fit\n", meshes.planned, meshes.fit);
  for (const auto& [settings, run] : meshes.best) {
    text += fmt::format("\n{:<10} {}\n", trainer::name_of(run.setup.roles.front().role),
                        mesh_text(run.setup.roles.front().mesh()));
    if (run.setup.rollout)
      text += fmt::format("rollout    {}\n", mesh_text(run.setup.rollout->mesh()));
    text += fmt::format(
        "step       {:.2f} s, {} tokens/s on each device, {} at most\n", run.plan.step_seconds(),
        format_count(static_cast<std::int64_t>(tokens_per_second(run.setup, run.plan))),
        trainer::in_words(most_on_device(run.plan)));
    text += fmt::format("settings   {}\n", fmt::join(settings, " "));
  }
  return text;
}

ordered_json meshes_json(const PlannedMeshes& meshes) {
  ordered_json best = ordered_json::array();
  for (const auto& [settings, run] : meshes.best)
    best.push_back({{"settings", settings},
                    {"chosen", run.choice.settings},
                    {"step_seconds", run.plan.step_seconds()},
                    {"tokens_per_second_per_device", tokens_per_second(run.setup, run.plan)},
                    {"most_on_device", most_on_device(run.plan)}});
  return {{"planned", meshes.planned}, {"fit", meshes.fit}, {"meshes", std::move(best)}};
}

std::string plan_text(const RunSetup& setup, const PlanChoice& chosen, const RunPlan& plan) {
  std::string text = fmt::format(
      "device     {} x {}, {} each, {} of it for the run\n", setup.world_size, setup.device.name,
      trainer::in_words(setup.device.memory), trainer::in_words(plan.memory));
  for (const auto& role : setup.roles)
    text += fmt::format("{:<10} {}  {}\n", trainer::name_of(role.role),
                        trainer::in_words(role.ranks), mesh_text(role.mesh()));
  if (setup.rollout)
    text += fmt::format("{:<10} {}  {}{}\n", "rollout", trainer::in_words(setup.rollout->ranks),
                        mesh_text(setup.rollout->mesh()),
                        setup.rollout->shares_memory ? ", in the actor's memory" : "");
  text += fmt::format("step       {} sequences of {} tokens\n", setup.sequences,
                      format_count(setup.longest_sequence));
  for (const auto& setting : chosen.settings) text += fmt::format("chosen     {}\n", setting);
  for (const auto& reason : chosen.offload) text += fmt::format("offload    {}\n", reason);
  const auto columns = columns_of(plan);
  for (const auto& group : plan.ranks) {
    text += fmt::format("\n{}: {}; GiB\n{:<17}", trainer::in_words(group.ranks),
                        fmt::join(group.parts, "; "), "phase");
    for (const auto& [name, member] : columns) text += fmt::format("{:>12}", name);
    text += fmt::format("{:>9}{:>9}\n", "total", "host");
    for (const auto& phase : group.phases) {
      text += fmt::format("{:<17}", phase.name);
      for (const auto& [name, member] : columns)
        text += fmt::format("{:>12}", in_gib(phase.bytes.*member));
      text +=
          fmt::format("{:>9}{:>9}{}\n", in_gib(phase.bytes.on_device()), in_gib(phase.bytes.host),
                      phase.bytes.on_device() > plan.memory ? "  does not fit" : "");
    }
  }
  if (plan.seconds.empty()) return text;
  text += "\n";
  for (const auto& phase : plan.seconds)
    text += fmt::format("{:<17}{:>10.2f} s\n", phase.name, phase.seconds);
  text +=
      fmt::format("{:<17}{:>10.2f} s, {} tokens/s on each device\n", "step", plan.step_seconds(),
                  format_count(static_cast<std::int64_t>(tokens_per_second(setup, plan))));
  return text;
}

ordered_json plan_json(const RunSetup& setup, const PlanChoice& chosen, const RunPlan& plan) {
  ordered_json ranks = ordered_json::array();
  for (const auto& group : plan.ranks) {
    ordered_json phases = ordered_json::array();
    for (const auto& phase : group.phases) {
      ordered_json bytes{{"name", phase.name}};
      for (const auto& [name, member] : kColumns) bytes[std::string(name)] = phase.bytes.*member;
      bytes["total"] = phase.bytes.on_device();
      bytes["host"] = phase.bytes.host;
      phases.push_back(std::move(bytes));
    }
    ranks.push_back(
        {{"ranks", group.ranks}, {"parts", group.parts}, {"phases", std::move(phases)}});
  }
  ordered_json seconds = ordered_json::object();
  for (const auto& phase : plan.seconds) seconds[phase.name] = phase.seconds;
  ordered_json json{{"device", {{"name", setup.device.name}, {"memory", setup.device.memory}}},
                    {"world_size", setup.world_size},
                    {"memory", plan.memory},
                    {"chosen", chosen.settings},
                    {"offload", chosen.offload},
                    {"ranks", std::move(ranks)},
                    {"tokens", plan.tokens}};
  if (!plan.seconds.empty()) {
    json["seconds"] = std::move(seconds);
    json["step_seconds"] = plan.step_seconds();
    json["tokens_per_second_per_device"] = tokens_per_second(setup, plan);
  }
  json["fits"] = plan.fits();
  json["misfits"] = plan.misfits;
  return json;
}

}  // namespace ferry::cli
