// Loads a checkpoint of any format into the memory of a parallel model: each rank plans the whole,
// keeps its part, and reads its own boxes straight from the files.
//
//   const auto mesh = distckpt::gather_mesh_layout(group, model.sharded_state_dict());
//   const auto checkpoint = converter::open(path);
//   distckpt::MemorySink memory(mesh.layout);
//   converter::load(checkpoint, mesh, memory);
#pragma once

#include <cstdint>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "converter/open/amendment.h"
#include "converter/open/checkpoint.h"
#include "converter/progress.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/memory_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/mesh_layout.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

struct LoadOptions {
  // The model's configuration if it is not the checkpoint's: it may lack prediction layers, which
  // then stay behind.
  std::optional<models::TransformerConfig> config{};
  // A model that ends in scores, of a checkpoint that ends in a language model's head: that one
  // stays behind, the scores begin as zeros. Zeros, not random numbers: a critic's first values are
  // then 0 whatever the seed and the mesh, and its head learns at once, the body behind it from the
  // second step on. Default: another head is an Error.
  bool new_head = false;
  // The shards of the mesh are those of the model's vision tower, and nothing else is loaded.
  bool vision_tower = false;
  // Rounds to nearest if the model has a narrower dtype than the checkpoint. Default: a value that
  // would be rounded is an Error.
  bool round = false;
  // Changes the checkpoint on its way; begin() has seen it. Each rank then reads the tensors of
  // which it has a part whole; a model that has them in a narrower dtype is an Error.
  Amendment* amendment = nullptr;
  // Rows beyond the vocabulary that both have are loaded too. Default: they become zero.
  bool keep_padding = false;
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of staging buffers
  std::pmr::memory_resource* staging = nullptr;       // where they come from; null: the heap
};

// The configuration of a critic that begins as the body of this model, without its prediction
// layers: one value for each token. A model that ends in scores stays what it is.
models::TransformerConfig with_value_head(models::TransformerConfig config);

// Names and shapes of a map's tensors, for the map of another configuration of the same model: they
// follow from files where the configuration leaves them open. `map` outlives it.
FindTensor spelling_of(const ModelMap& map);

struct LoadPlan {
  distckpt::CopyPlan copy{};  // this rank's part
  // Tensors of the checkpoint that the model lacks, a vision tower's among them.
  std::vector<std::string> left_behind{};
  std::vector<std::string> from_zero{};      // tensors of the model that the checkpoint lacks
  std::vector<std::string> second_copies{};  // tensors stored twice: compared where they are read
};

struct LoadReport {
  std::int64_t bytes = 0;  // that this rank took in, in the dtypes of the model
  double seconds = 0;
  int threads = 0;
  std::vector<distckpt::NonZeroPadding> nonzero_padding{};  // dropped, as far as this rank looked
  std::vector<std::string> left_behind{};
  std::vector<std::string> from_zero{};
  std::vector<std::string> second_copies{};
};

// The shards of the mesh are named as Megatron-Core names modules, each layer and each expert under
// a key of its own (single_key); those of an optimizer, from a checkpoint that was opened with its
// training state, as save.h has them. Each is loaded in its own dtype: a widening is exact. Throws
// Error(kLayout) that names a tensor which is missing, surplus, or of another shape.
LoadPlan plan_load(const Checkpoint& checkpoint,
                   const distckpt::MeshLayout& mesh,
                   const LoadOptions& options = {});

// `memory` is of mesh.layout. When it returns, every byte of the rank's shards has been written.
LoadReport load(const Checkpoint& checkpoint,
                const distckpt::MeshLayout& mesh,
                distckpt::MemorySink& memory,
                const LoadOptions& options = {},
                const ProgressFunction& progress = {});

}  // namespace ferry::converter
