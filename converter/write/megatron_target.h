// A Megatron-Core checkpoint to be written: one iteration's folder, in the profile that every
// release since 0.13 loads, with a sidecar for the way back.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/write/target.h"
#include "distckpt/plan/mesh_layout.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

struct MegatronTargetOptions {
  models::ParallelConfig parallel{};
  // Ranks that write what they hold, each its file; null: the ranks of `parallel` as Megatron-Core
  // would have them.
  const distckpt::MeshLayout* mesh = nullptr;
  MegatronLayout layout = MegatronLayout::kLanguageModel;
  distckpt::Iteration iteration{};         // what the arguments and the folder's name say
  std::optional<distckpt::DType> dtype{};  // a cast: the Hugging Face headers are not kept
  bool run_config = true;                  // write Megatron-Bridge's, where it can make the model
};

// RNG state is that of tensor and pipeline parallel ranks, as Megatron-LM's loader has it: it stays
// where their numbers stay.
bool keeps_rng(const TrainingState& training, const models::ParallelConfig& parallel);

// `tensors` are those of `source`, with the dtypes to be written. `source` must outlive the target.
std::unique_ptr<FileTarget> make_megatron_target(const Checkpoint& source,
                                                 const std::vector<distckpt::ModelTensor>& tensors,
                                                 const MegatronTargetOptions& options,
                                                 const std::filesystem::path& folder);

}  // namespace ferry::converter
