// The sidecar of a Megatron checkpoint: what a Hugging Face checkpoint has beyond its tensors'
// values, so that the way back is byte-identical. A folder "ferry" inside the iteration's folder,
// which Megatron does not look at:
//   sidecar.json          the other files, with their digests
//   hf/*                  config.json, tokenizer, index, ...: copied
//   headers/*             the first bytes of each safetensors file, up to its first tensor
//   derived.safetensors   tensors that follow from the configuration (inv_freq), if there were any
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "converter/hf_folder.h"

namespace ferry::converter {

// Nothing if the iteration's folder has none. Throws Error(kCorrupt) naming a file that is not as
// it was written.
std::optional<HfForm> read_sidecar(const std::filesystem::path& iteration_folder);

// Writes the sidecar of `form`; derived.safetensors, if any, is in place already. Headers are left
// out unless `keep_headers`.
void write_sidecar(const std::filesystem::path& iteration_folder,
                   const HfForm& form,
                   bool keep_headers);

std::filesystem::path derived_path(const std::filesystem::path& iteration_folder);

// Copies a small file, durably.
void carry_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace ferry::converter
