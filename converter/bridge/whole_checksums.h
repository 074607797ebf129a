// Checksums of bytes that no rank of a mesh reads whole: each rank takes the part of a tensor that
// it holds, so that none of them can say whether the whole has the checksum which its file states.
// One of those that read a part then reads the whole once more, past its model's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "distckpt/execute/file_box_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/mesh_layout.h"

namespace ferry::converter {

// The indices, in `checksums`, of the ranges that this rank has to read whole. `plan` is that of
// all ranks, `mesh` the layout of its targets; all ranks give the same answer to whose turn it is.
// Ranges are dealt out among the ranks that read a part of them; nobody has those that a rank reads
// whole anyway, and those of which nothing is read.
std::vector<std::uint32_t> checksums_to_read(
    const distckpt::CopyPlan& plan,
    const distckpt::MeshLayout& mesh,
    const std::vector<distckpt::ExpectedChecksum>& checksums);

// Reads these ranges, a few MiB at a time on each of `threads` (0: one per core) threads. Throws
// Error(kCorrupt) naming one whose bytes do not have the checksum that the file states.
void read_checksums(distckpt::BoxSource& source,
                    const std::vector<distckpt::ExpectedChecksum>& checksums,
                    const std::vector<std::uint32_t>& which,
                    int threads);

}  // namespace ferry::converter
