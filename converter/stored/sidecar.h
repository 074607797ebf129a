// The sidecar of a Megatron checkpoint: what a Hugging Face checkpoint has beyond its tensors'
// values, so that the way back is byte-identical. A folder "ferry" inside the iteration's folder,
// which Megatron does not look at:
// - sidecar.json: the other files, with their digests; dtypes of tensors stored in wider ones;
//   where there are no headers, shapes of tensors that the configuration alone does not tell;
// - hf/*: config.json, tokenizer, index, ..., copied;
// - headers/*: the first bytes of each safetensors file, up to its first tensor;
// - derived.safetensors: tensors that follow from the configuration (inv_freq), if any.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "converter/stored/hf_folder.h"

namespace ferry::converter {

// Nothing if the iteration's folder has none. Throws Error(kCorrupt) naming a file that is not as
// it was written, Error(kUsage) for a link that leads out of the iteration's folder.
std::optional<HfForm> read_sidecar(const std::filesystem::path& iteration_folder, Links links);

// Writes the sidecar of `form`; derived.safetensors, if any, is in place already. Headers are left
// out unless `keep_headers`. `dtypes` are those of tensors that Megatron stores in a wider one,
// `shapes` are ModelMap::chosen.
void write_sidecar(const std::filesystem::path& iteration_folder,
                   const HfForm& form,
                   bool keep_headers,
                   const std::map<std::string, distckpt::DType>& dtypes,
                   const std::map<std::string, distckpt::Shape>& shapes);

std::filesystem::path derived_path(const std::filesystem::path& iteration_folder);

// Writes the record of a part, if it is one, durably.
void carry_part(const HfForm& form, const std::filesystem::path& folder);

// The files of a sidecar, "hf/config.json" and so on: what an archive holds too.
std::map<std::string, CarriedFile> sidecar_files(const HfForm& form, bool keep_headers);

// The inverse, of their content. `folder` is where they lie: those that travel may be left away
// here and read there. Throws Error(kCorrupt).
HfForm form_of_sidecar(const std::map<std::string, std::string>& files,
                       const std::filesystem::path& folder);

}  // namespace ferry::converter
