#include "trainer/run/run_start.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <system_error>

#include "distckpt/base/error.h"
#include "distckpt/storage/filenames.h"
#include "trainer/engine/run_options.h"
#include "trainer/engine/training_checkpoint.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;

fs::path role_folder(const fs::path& run, const std::string& role) {
  return role.empty() ? run : run / role;
}

// Steps that all roles of a run have saved, ascending.
std::vector<std::int64_t> saved_steps(const fs::path& run, const RoleFolders& roles) {
  auto steps = saved_iterations(role_folder(run, roles.front()));
  for (const auto& role : roles) {
    const auto saved = saved_iterations(role_folder(run, role));
    std::erase_if(steps, [&](auto step) { return !std::ranges::binary_search(saved, step); });
  }
  return steps;
}

// Throws Error(kUsage) if the first role has checkpoints, and another one not even a folder. The
// first role is the last that is saved, so the run that wrote them had not the other.
void require_folders(const fs::path& run, const RoleFolders& roles) {
  if (saved_iterations(role_folder(run, roles.front())).empty()) return;
  for (const auto& role : roles)
    if (!fs::exists(role_folder(run, role)))
      throw Error(ErrorKind::kUsage,
                  fmt::format("{}: has checkpoints of {}, and none of {}: the run that wrote them "
                              "had no {}, this one has",
                              run.string(), roles.front(), role, role),
                  fmt::format("begin in another trainer.default_local_dir, with {} as the model",
                              role_folder(run, roles.front()).string()));
}

// Begins behind a step of another run: that of RUN/actor/iter_0000100, of RUN/iter_0000100 where
// there is one role, or the newest one of RUN.
RunStart start_elsewhere(const fs::path& path, const RoleFolders& roles) {
  auto run = path.has_filename() ? path : path.parent_path();
  std::optional<std::int64_t> named;
  if (const auto folder = distckpt::parse_iteration_folder(run.filename().string());
      folder && folder->number) {
    named = folder->number;
    run = run.parent_path();
    if (!roles.front().empty()) run = run.parent_path();
  }
  require_folders(run, roles);
  const auto steps = saved_steps(run, roles);
  const auto whose = roles.front().empty() ? "" : fmt::format(" of {}", fmt::join(roles, " and "));
  require(!steps.empty(), ErrorKind::kNotFound, "{}: no checkpoint{} to go on from", path.string(),
          whose);
  require(!named || std::ranges::binary_search(steps, *named), ErrorKind::kNotFound,
          "{}: no checkpoint{} behind step {}, only behind {}", path.string(), whose,
          named.value_or(0), fmt::join(steps, ", "));
  return {.step = named.value_or(steps.back()), .root = run};
}

}  // namespace

RunStart run_start(const CheckpointSection& checkpoint,
                   const fs::path& folder,
                   const RoleFolders& roles) {
  if (checkpoint.resume_mode == ResumeMode::kAuto) {
    require_folders(folder, roles);
    const auto steps = saved_steps(folder, roles);
    return {.step = steps.empty() ? 0 : steps.back()};
  }
  auto start = checkpoint.resume_mode == ResumeMode::kResumePath
                   ? start_elsewhere(checkpoint.resume_from_path, roles)
                   : RunStart{};
  for (const auto& role : roles) require_none_newer(role_folder(folder, role), start.step);
  return start;
}

bool goes_on(const RunStart& start, const fs::path& folder) {
  std::error_code error;  // a folder that is not there yet
  return start.step > 0 && (start.root.empty() || fs::equivalent(start.root, folder, error));
}

void finish_resumed_save(const RunStart& start,
                         const CheckpointSection& checkpoint,
                         const ModelConfig& model,
                         const fs::path& folder,
                         const RoleFolders& roles) {
  if (!goes_on(start, folder)) return;
  for (const auto& role : roles)
    publish_resumed({.root = role_folder(folder, role),
                     .keep_last = kept_of_roles(checkpoint.keep_last.value_or(0), roles.size()),
                     .keep_every = checkpoint.keep_every.value_or(0)},
                    start.step);
  const auto exported = role_folder(folder, roles.front());
  if (checkpoint.save_hf && !has_newest_hf(exported, model.hf_config_path))
    save_hf(exported, model.hf_config_path);
}

}  // namespace ferry::trainer
