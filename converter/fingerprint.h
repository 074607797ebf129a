// What tells one conversion from every other: its journal, and the ranks that share it, belong to
// one alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "converter/open/checkpoint.h"
#include "distckpt/elements/digest.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"

namespace ferry::converter {

// The files of a layout and their sizes, of an archive's the decoded ones.
std::vector<std::pair<std::filesystem::path, std::int64_t>> files_of(
    const distckpt::Layout& layout);

// All that opening a checkpoint tells of it: its files as they are, where each tensor lies, what
// travels with them. Equal for two that were opened from the same files.
distckpt::Digest summary(const Checkpoint& checkpoint);

// The source's files as they are, the plan, the target's files in `folder`.
distckpt::Digest fingerprint(const Checkpoint& source,
                             const distckpt::CopyPlan& plan,
                             const distckpt::Layout& target,
                             const std::filesystem::path& folder);

}  // namespace ferry::converter
