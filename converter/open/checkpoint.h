// A checkpoint that lies somewhere, whatever its format: recognised, checked, and described as a
// source of a plan.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/model_map.h"
#include "converter/families/tower.h"
#include "converter/open/training_state.h"
#include "converter/stored/hf_folder.h"
#include "converter/stored/locate.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// A model's prediction layers.
enum class PredictionLayers {
  kKeep,   // those that are there, whatever config.json says
  kDrop,   // none: as if the model had never had some
  kError,  // all that config.json names have to be there
};

struct OpenOptions {
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};  // a folder with the config.json that a Megatron checkpoint
                                      // lacks; replaces its sidecar
  bool keep_quantized = false;  // leave block-quantised weights as they are, with their scales
  bool training_state = false;  // of Megatron-Core: also the optimizer and the RNG
  Links links = Links::kAll;    // among files that travel
  PredictionLayers mtp = PredictionLayers::kKeep;
  bool incomplete = false;  // a Hugging Face checkpoint may lack tensors and files of its index
  bool without_adapter = false;  // a LoRA adapter beside the model is left out, else refused
};

struct Checkpoint {
  Location location{};
  bool megatron_names = false;  // of the stored tensors, else Hugging Face's
  MegatronLayout megatron_layout = MegatronLayout::kLanguageModel;  // of those
  ModelMap map{};
  std::vector<distckpt::ModelTensor>
      tensors{};  // map.tensors with the dtypes that are stored, derived ones, the optimizer's
  distckpt::Layout layout{};
  distckpt::TensorMap links{};
  std::vector<distckpt::ExpectedChecksum> checksums{};
  std::optional<HfForm>
      hf{};  // nothing for a Megatron checkpoint that knows nothing of Hugging Face
  std::vector<std::string> training_state{};  // keys of optimizer and RNG: not part of the model
  bool untied = false;                        // though config.json ties the ends: they differ
  std::int64_t num_adapter_tensors = 0;       // factors of a LoRA adapter that were left out
  std::shared_ptr<const distckpt::Pickle> common{};      // Megatron's common state
  std::optional<TrainingState> training{};               // where asked for, and there
  std::shared_ptr<const distckpt::SourceFiles> files{};  // all that were read, as they were

  distckpt::PlanSide side() const { return {.layout = &layout, .map = &links}; }
  // Throws Error(kIo) where a file is not what it was when the checkpoint was opened.
  std::unique_ptr<distckpt::FileSource> source(
      distckpt::ReadMode mode = distckpt::ReadMode::kCached) const;
};

// Throws Error for everything that is not exactly what the configuration says: tensors that are
// missing, surplus or of another shape are named.
Checkpoint open(const std::filesystem::path& path, const OpenOptions& options = {});

// The same of one that was found already, whatever its tracker says by now.
Checkpoint open(const Location& location, const OpenOptions& options);

// The tensors of one safetensors file, under the names and in the dtypes that they have there: no
// model's. `hf` holds its header alone. The caller notes its files (NotedFiles).
Checkpoint open_file(const std::filesystem::path& file);

// Throws Error(kUsage) if a configuration is named beside a checkpoint's own.
void refuse_hf_config(const Location& location, const std::filesystem::path& hf_config);

// The quantisation that a checkpoint without iterations states in its configuration, if any.
std::optional<Quantization> stored_quantization(const std::filesystem::path& path);

// "llama, by Megatron's arguments; OPTION names another": several families may have the arguments
// of a Megatron checkpoint without a config.json. Empty for others. `option` names a folder with
// one.
std::string family_by_arguments(const Checkpoint& checkpoint, std::string_view option);

// Targets that carry config.json and the tokenizer need some. Throws Error(kUsage) if the source
// has none.
void require_hf_form(const Checkpoint& checkpoint);

// Throws Error(kLayout), which says `instead`, if the model's tensors are not known under
// Megatron-Core's names: their family is unknown, or passes through.
void require_megatron_form(const Checkpoint& checkpoint, std::string_view instead);

// Leaves the derived tensors out of the model: files that are made anew hold none.
void leave_out_derived(Checkpoint& checkpoint);

// Keeps only the tensors that are selected, and records that in the Hugging Face form. The headers
// of its files, which are those of the whole, are dropped.
void restrict_checkpoint(Checkpoint& checkpoint, const Selection& selection);

// The derived tensors (inv_freq) of a checkpoint are what its configuration gives. Throws
// Error(kCorrupt).
void check_derived(const Checkpoint& checkpoint);

}  // namespace ferry::converter
