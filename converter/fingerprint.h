// What tells one conversion from every other: its journal, and the ranks that share it, belong to
// one alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "converter/checkpoint.h"
#include "distckpt/copy_plan.h"
#include "distckpt/digest.h"
#include "distckpt/layout.h"

namespace ferry::converter {

// The files of a layout and their sizes, of an archive's the decoded ones.
std::vector<std::pair<std::filesystem::path, std::int64_t>> files_of(
    const distckpt::Layout& layout);

// The source's files as they are, the plan, the target's files.
distckpt::Digest fingerprint(const Checkpoint& source,
                             const distckpt::CopyPlan& plan,
                             const distckpt::Layout& target);

}  // namespace ferry::converter
