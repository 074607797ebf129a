// The step behind which a run begins: the newest one that all of its roles have saved, in its own
// folder or in that of another run, or one that is named.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "trainer/config/run_sections.h"

namespace ferry::trainer {

struct RunStart {
  std::int64_t step = 0;         // 0: the run begins with the model
  std::filesystem::path root{};  // another run's checkpoints of this step; empty: its own
};

// The folders of checkpoints below a run's: of a run of several roles one each, that of the role
// that is saved last first; else "".
using RoleFolders = std::vector<std::string>;

// The start that `checkpoint` asks for in the run of `folder`. Throws Error(kNotFound) where what
// it names is not there, Error(kUsage) if the run would write over what its folder has, or if the
// run that saved lacked a role.
RunStart run_start(const CheckpointSection& checkpoint,
                   const std::filesystem::path& folder,
                   const RoleFolders& roles);

// True if the run in `folder` goes on from a step of its own.
bool goes_on(const RunStart& start, const std::filesystem::path& folder);

// Finishes the save of the step that the run in `folder` goes on from, which may have been killed
// between the last rename and its end: publish_resumed() of every role, and save_hf() unless that
// is done. Nothing if the run begins anew or goes on from another one. Called by one process, after
// loading.
void finish_resumed_save(const RunStart& start,
                         const CheckpointSection& checkpoint,
                         const ModelConfig& model,
                         const std::filesystem::path& folder,
                         const RoleFolders& roles);

}  // namespace ferry::trainer
