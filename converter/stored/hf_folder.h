// A Hugging Face folder: which safetensors files make up the model, and which other files travel
// with it.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/quantization.h"
#include "converter/stored/carried_file.h"
#include "converter/stored/part.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/source_files.h"

namespace ferry::converter {

// The Hugging Face side of a checkpoint, wherever it lies: in a Hugging Face folder, in the sidecar
// of a Megatron checkpoint, or in an archive.
struct HfForm {
  std::filesystem::path folder{};                 // of the carried files
  std::map<std::string, std::string> contents{};  // of those that lie in no folder, or change
  std::vector<std::string>
      carried;  // config.json, tokenizer and the like; sorted. Not the weights, nor their index
  Part part{};  // which part of the model is there; empty: all of it
  std::vector<distckpt::SafetensorsHeader>
      headers;  // the files' headers, if known: order, metadata and split
  std::map<std::string, distckpt::DType> dtypes{};  // of tensors, where headers are not to be kept
  std::map<std::string, distckpt::Shape>
      shapes{};                             // likewise, of those that ModelMap::chosen names
  std::optional<std::string> index_text{};  // model.safetensors.index.json, if there is one
  std::vector<std::string> absent{};        // that the index names, and no file holds
  std::shared_ptr<const distckpt::SourceFiles> files{};  // as they were when they were found

  // Throws Error(kIo) if it is not the file that was found.
  CarriedFile file(const std::string& name) const;  // of a carried file, or what it has to become
  std::string text(const std::string& name) const;  // the same, whole
  std::string config_text() const;                  // of config.json, likewise
  std::string config_source() const;                // its path, for messages
  // The shape of a tensor that files of it are known to hold; empty if its shape is not known.
  std::optional<distckpt::Shape> find(const std::string& tensor) const;

  // Makes it the form of dequantised weights: a configuration that says so, and no headers. Leaves
  // the form of a model that is not quantised as it is.
  void leave_quantization();
  // Makes it the form of weights that are quantised so, but for those modules.
  void quantize(Quantization::Method method, const std::vector<std::string>& not_converted);
  // Says in its config.json that weights have this dtype.
  void set_dtype(distckpt::DType dtype);
  // Likewise that embedding and output layer are two tensors.
  void untie_ends();
  // Makes it the form of a model without prediction layers, likewise.
  void leave_prediction_layers();
};

// The form with another dtype, made in `cast`; without one the form itself, whose headers may be
// large.
const HfForm& form_as(const HfForm& form,
                      const std::optional<distckpt::DType>& dtype,
                      std::optional<HfForm>& cast);

// The name of the file of weights, or of the index of several, that transformers 5.17 loads from a
// folder (modeling_utils.py, _get_resolved_checkpoint_files): model.safetensors, its index,
// pytorch_model.bin, its index, the first that is there. Empty: none is.
std::string_view loaded_weights(const std::filesystem::path& folder);

// True if the folder holds a config.json or safetensors files.
bool is_hf_folder(const std::filesystem::path& folder);

// Symbolic links among the files that travel are followed: those that stay inside the
// checkpoint or the Hugging Face cache that it is in, or all. One that leads nowhere is an error.
enum class Links { kInside, kAll };

// Reads the headers of loaded_weights(), or of another safetensors file that is alone. Throws
// Error(kCorrupt | kNotFound) for an index that does not match its files, naming tensor and file.
// With `incomplete` the index may name files and tensors that are not there.
HfForm read_hf_folder(const std::filesystem::path& folder, Links links, bool incomplete = false);

// True if a file of this name goes along with the weights: it holds none.
bool travels(std::string_view name);

// The files that hold a model's weights.
struct WeightFiles {
  std::filesystem::path folder{};
  std::set<std::string> files{};
  std::string_view index{};   // the name of the index that lists them, if there is one
  std::string_view single{};  // model.safetensors, if it is there: one of them or not
};

// transformers (modeling_utils.py, _get_resolved_checkpoint_files) loads the file that config.json
// names, else the single one, and looks for an index only where there is neither. Throws
// Error(kLayout) where that is another model than `weights`.
void require_transformers_reads(const HfForm& form, const WeightFiles& weights);

// Only the files that travel; each is opened. Throws Error(kUsage) for a link that leads outside.
HfForm read_hf_companions(const std::filesystem::path& folder, Links links);

// For --hf-config: the files that travel, and the dtypes of the model's weights that are there.
HfForm read_hf_config(const std::filesystem::path& folder, Links links);

// The files that an index names, sorted. Throws Error(kCorrupt).
std::set<std::string> files_of_index(const std::string& index_text, const std::string& source);

// The same of a model's, which has tensors.
std::set<std::string> files_of_model(const std::string& index_text, const std::string& source);

// Index and files agree: each tensor is in the file that the index names, and no other. With
// `incomplete` files may lack tensors, which are returned. Throws Error(kCorrupt).
std::vector<std::string> check_index(const std::string& index_text,
                                     const std::map<std::string, std::string>& in_file,
                                     const std::string& source,
                                     bool incomplete = false);

// The file of each tensor. Throws Error(kCorrupt) for one that two files have.
std::map<std::string, std::string> files_of_tensors(
    const std::vector<distckpt::SafetensorsHeader>& headers);

}  // namespace ferry::converter
