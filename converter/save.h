// Saves a parallel model from the memory of its ranks: a Megatron-Core checkpoint, in which each
// rank writes what it holds the main replica of. It appears when all have written, or not at all.
//
//   const auto mesh = distckpt::gather_mesh_layout(group, model.sharded_state_dict());
//   distckpt::MemorySource memory(mesh.layout);
//   converter::save(group, mesh, memory, {.config = config, .to = folder, .parallel = parallel});
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory_resource>

#include "converter/checkpoint.h"
#include "converter/progress.h"
#include "distckpt/box_io.h"
#include "distckpt/filenames.h"
#include "distckpt/mesh_layout.h"
#include "distckpt/parallel_config.h"
#include "distckpt/rank_group.h"
#include "distckpt/transformer_config.h"

namespace ferry::converter {

struct SaveOptions {
  distckpt::TransformerConfig config{};  // of the model
  std::filesystem::path to{};            // the root of iterations
  distckpt::Iteration iteration{};
  distckpt::ParallelConfig parallel{};  // of the mesh: what the arguments of the run say
  // That the model was loaded from: the arguments of its run go along, and where it is of the same
  // configuration its config.json and tokenizer. Null: the checkpoint has weights alone.
  const Checkpoint* origin = nullptr;
  bool overwrite = false;
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of staging buffers
  std::pmr::memory_resource* staging = nullptr;       // where they come from; null: the heap
};

struct SaveReport {
  std::filesystem::path folder{};  // of the iteration
  std::int64_t bytes = 0;          // that this rank wrote
  double seconds = 0;
};

// Called by all ranks of the group that made `mesh`; `memory` is of mesh.layout. The folder must be
// one that all ranks see. When it returns the checkpoint is published and durable; where one rank
// fails all throw, and what was there before is as it was.
SaveReport save(const distckpt::RankGroup& group,
                const distckpt::MeshLayout& mesh,
                distckpt::BoxSource& memory,
                const SaveOptions& options,
                const ProgressFunction& progress = {});

}  // namespace ferry::converter
