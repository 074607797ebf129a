#include "trainer/ppo/ppo_resume.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/engine/training_checkpoint.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {
namespace {

// Steps that all roles of a run have saved, ascending.
std::vector<std::int64_t> saved_steps(const std::filesystem::path& run, bool use_critic) {
  auto steps = saved_iterations(run / "actor");
  if (use_critic) {
    const auto of_critic = saved_iterations(run / "critic");
    std::erase_if(steps, [&](auto step) { return !std::ranges::binary_search(of_critic, step); });
  }
  return steps;
}

// Begins behind a step of another run: that of RUN/actor/iter_0000100, or the newest one of RUN.
PpoStart start_elsewhere(const PpoConfig& config) {
  const auto& path = config.checkpoint.resume_from_path;
  const auto [root, named] = resume_from(path);
  const auto run = named ? root.parent_path() : root;
  const auto steps = saved_steps(run, config.use_critic());
  const auto* const roles = config.use_critic() ? "actor and critic" : "actor";
  require(!steps.empty(), ErrorKind::kNotFound, "{}: no checkpoint of {} to go on from", path,
          roles);
  require(!named || std::ranges::binary_search(steps, *named), ErrorKind::kNotFound,
          "{}: no checkpoint of {} behind step {}, only behind {}", path, roles, named.value_or(0),
          fmt::join(steps, ", "));
  return {.step = named.value_or(steps.back()), .run = run};
}

}  // namespace

PpoStart ppo_start(const PpoConfig& config) {
  const std::filesystem::path folder = config.trainer.run.default_local_dir;
  const auto mode = config.checkpoint.resume_mode;
  if (mode == ResumeMode::kAuto) {
    const auto steps = saved_steps(folder, config.use_critic());
    return {.step = steps.empty() ? 0 : steps.back()};
  }
  const auto start = mode == ResumeMode::kResumePath ? start_elsewhere(config) : PpoStart{};
  for (const char* role : {"actor", "critic"}) require_none_newer(folder / role, start.step);
  return start;
}

}  // namespace ferry::trainer
