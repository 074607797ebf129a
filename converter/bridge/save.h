// Saves a parallel model from the memory of its ranks: a Megatron-Core checkpoint, in which each
// rank writes what it holds the main replica of. It appears when all have written, or not at all.
//
//   const auto mesh = distckpt::gather_mesh_layout(group, model.sharded_state_dict());
//   distckpt::MemorySource memory(mesh.layout);
//   converter::save(group, mesh, memory, {.config = config, .to = folder, .parallel = parallel});
//
// Shards of an optimizer are saved with those of the model, in any boxes: "optimizer.state." with
// exp_avg, exp_avg_sq or param (the fp32 master), and the parameter's key:
// "optimizer.state.exp_avg.decoder.layers.3.mlp.linear_fc1.weight".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <memory_resource>
#include <optional>
#include <vector>

#include "converter/manifest.h"
#include "converter/open/checkpoint.h"
#include "converter/progress.h"
#include "distckpt/formats/torch_dist_writer.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/mesh_layout.h"
#include "distckpt/plan/rank_group.h"
#include "distckpt/storage/filenames.h"
#include "models/spec/parallel_config.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

struct SaveOptions {
  models::TransformerConfig config{};  // of the model
  std::filesystem::path to{};          // the root of iterations
  distckpt::Iteration iteration{};
  models::ParallelConfig parallel{};  // of the mesh: what the arguments of the run say
  // The checkpoint that the model was loaded from, or null: then weights alone are written. The
  // arguments of its run go along, and, if the configuration is the same but for a new head and
  // missing prediction layers, its config.json, its tokenizer and the tensors that no rank holds, a
  // vision tower's, as they lie in its files.
  const Checkpoint* origin = nullptr;
  // Megatron-Core's common state of a training run, a dict: `args`, `opt_param_scheduler`, and
  // under `optimizer` the param_groups, without which no state of an optimizer is saved. Null: the
  // origin's, if it has one.
  std::shared_ptr<const distckpt::Pickle> common{};
  // This rank's objects, each under a key of its own: "rng_state/shard_0.1_1.2",
  // "trainer.cursor/shard_0_1".
  std::vector<distckpt::StoredObject> objects{};
  bool overwrite = false;
  // Before it appears, read it back from the disk: each rank compares what it would load with its
  // memory, and together they digest all tensors.
  bool prove = false;
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of staging buffers
  std::pmr::memory_resource* staging = nullptr;       // where they come from; null: the heap
};

struct SaveReport {
  std::filesystem::path folder{};  // of the iteration
  std::int64_t bytes = 0;          // that this rank wrote
  double seconds = 0;              // of everything
  bool proved = false;
  bool proof_from_disk = false;  // past the page cache
  double proof_seconds = 0;
  std::optional<Manifest> manifest{};  // of what was proved, without files; on rank 0
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
