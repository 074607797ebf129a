// A checkpoint that lies somewhere, whatever its format: recognised, checked, and described as a
// source of a plan.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/hf_folder.h"
#include "converter/model_map.h"
#include "distckpt/copy_plan.h"
#include "distckpt/file_box_io.h"
#include "distckpt/filenames.h"
#include "distckpt/layout.h"
#include "distckpt/tensor_map.h"
#include "distckpt/torch_dist.h"

namespace ferry::converter {

enum class Format { kHuggingFace, kTorchDist };
std::string_view to_string(Format format);  // "huggingface", "torch_dist"

// Where a checkpoint lies and what it is, before anything of it is read.
struct Location {
  Format format = Format::kHuggingFace;
  std::filesystem::path root{};    // as named by the user
  std::filesystem::path folder{};  // of the files: for Megatron the iteration's
  std::optional<distckpt::Iteration>
      iteration;  // Megatron, if a tracker or the folder's name says it
};

// Throws Error(kNotFound) that says what was looked for. `iteration` chooses one of a Megatron
// checkpoint's; default: the tracker's.
Location locate(const std::filesystem::path& path,
                std::optional<distckpt::Iteration> iteration = std::nullopt);

// True if `locate` would find a Hugging Face checkpoint there: one without iterations.
bool is_hf_checkpoint(const std::filesystem::path& path);

struct OpenOptions {
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};  // a folder with the config.json that a Megatron checkpoint
                                      // lacks; replaces its sidecar
  bool keep_fp8 = false;  // leave block-quantised weights as they are, with their scales
};

struct Checkpoint {
  Location location{};
  ModelMap map{};
  std::vector<distckpt::ModelTensor>
      tensors;  // map.tensors with the dtypes that are stored, then derived ones
  distckpt::Layout layout{};
  distckpt::TensorMap links{};
  std::vector<distckpt::ExpectedChecksum> checksums{};
  std::optional<HfForm>
      hf{};  // nothing for a Megatron checkpoint that knows nothing of Hugging Face
  std::optional<distckpt::TorchDistCheckpoint> torch_dist{};
  std::vector<std::string> training_state{};  // keys of optimizer and RNG: not part of the model

  distckpt::PlanSide side() const { return {.layout = &layout, .map = &links}; }
  std::unique_ptr<distckpt::FileSource> source(
      distckpt::ReadMode mode = distckpt::ReadMode::kCached) const;
};

// Throws Error for everything that is not exactly what the configuration says: tensors that are
// missing, surplus or of another shape are named.
Checkpoint open(const std::filesystem::path& path, const OpenOptions& options = {});

// A Hugging Face checkpoint has its own configuration. Throws Error(kUsage) if another is named.
void refuse_hf_config(const std::filesystem::path& path, const std::filesystem::path& hf_config);

// The derived tensors (inv_freq) of a checkpoint are what its configuration gives. Throws
// Error(kCorrupt).
void check_derived(const Checkpoint& checkpoint);

}  // namespace ferry::converter
