#include "cli/report/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "trainer/plan/memory_advice.h"

namespace ferry::cli {
namespace {

using nlohmann::ordered_json;
// The bytes of a rank in the phase that has the most of them.
std::int64_t most_on_device(const trainer::RunPlan& plan) {
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
                        trainer::mesh_text(run.setup.roles.front().mesh()));
    if (run.setup.rollout)
      text += fmt::format("rollout    {}\n", trainer::mesh_text(run.setup.rollout->mesh()));
    text += fmt::format("step       {}, {} at most\n", trainer::rate_text(run),
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
                    {"tokens_per_second_per_device", trainer::tokens_per_second(run)},
                    {"most_on_device", most_on_device(run.plan)}});
  return {{"planned", meshes.planned}, {"fit", meshes.fit}, {"meshes", std::move(best)}};
}

ordered_json plan_json(const trainer::PlannedRun& run) {
  const auto& [setup, chosen, plan] = run;
  ordered_json ranks = ordered_json::array();
  for (const auto& group : plan.ranks) {
    ordered_json phases = ordered_json::array();
    for (const auto& phase : group.phases) {
      ordered_json bytes{{"name", phase.name}};
      for (const auto& [name, member] : trainer::kDeviceParts)
        bytes[std::string(name)] = phase.bytes.*member;
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
    json["tokens_per_second_per_device"] = trainer::tokens_per_second(run);
  }
  json["fits"] = plan.fits();
  json["misfits"] = plan.misfits;
  return json;
}

}  // namespace ferry::cli
