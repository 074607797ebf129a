// A conversion before its first byte is copied: the source, opened and checked, and then the plan
// of what is written where. A fingerprint of both tells one conversion from every other: its
// journal, and the ranks that share it, belong to it alone.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "converter/convert.h"
#include "converter/open/checkpoint.h"
#include "converter/write/target.h"
#include "distckpt/elements/digest.h"
#include "distckpt/execute/executor.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::converter {

struct OpenedConversion {
  Checkpoint source{};                           // without what is not selected
  distckpt::Digest source_summary{};             // of the source as it was opened
  std::optional<distckpt::Digest> amendment{};   // the identity of what changes it
  Format format = Format::kTorchDist;            // of the target
  distckpt::Iteration iteration{};               // of a Megatron target
  std::filesystem::path target{};                // the folder that is published
  bool published = false;                        // by an interrupted run, which is gone on with
  std::vector<distckpt::ModelTensor> tensors{};  // with the dtypes that the target gets
};

// Opens the source, and checks options and target against it. Throws Error.
OpenedConversion open_conversion(const ConvertOptions& options);

// Opens the source again: one source alone is published. Throws Error(kIo) if it is not what it
// was.
void require_same_source(const OpenedConversion& opened, const ConvertOptions& options);

struct PlannedConversion {
  std::vector<distckpt::ModelTensor> tensors{};  // also padding that both sides hold
  std::set<std::string> shared_padding{};        // the names of that padding
  std::filesystem::path folder{};                // where the target is written
  std::unique_ptr<Target> target{};
  distckpt::CopyPlan copy{};
  distckpt::StagingBudget staging{};
  std::vector<FileSize> tensor_files{};        // in `folder`; of an archive before compression
  std::vector<std::filesystem::path> files{};  // all that are written, relative to `folder`
};

// Plans to write the target into `folder`. Throws Error, also where rank 0 would replace a target
// that holds anything but a conversion's files.
PlannedConversion plan_conversion(const OpenedConversion& opened,
                                  const ConvertOptions& options,
                                  const std::filesystem::path& folder);

// Throws Error(kLayout) naming a tensor that one side holds less one, rounded: it is not amended
// bit for bit.
void require_amendable(const distckpt::CopyPlan& plan);

// A digest of the source's files as they are, the plan, and the target's files.
distckpt::Digest fingerprint(const OpenedConversion& opened, const PlannedConversion& planned);

distckpt::ExecutorOptions executor_options(const ConvertOptions& options);

// The same to read the source, amended, and to copy it.
distckpt::ExecutorOptions copying_options(const PlannedConversion& planned,
                                          const ConvertOptions& options);

}  // namespace ferry::converter
